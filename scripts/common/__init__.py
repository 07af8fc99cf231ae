"""What the scripts share: measuring and reporting, models and traces, pools with known bytes."""
