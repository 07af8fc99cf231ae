"""What a quantised cache costs in quality: schemes, rows with outliers, and a small model."""
