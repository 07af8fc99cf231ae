"""What the scripts share: devices and timelines, traces, what a task lacks."""
