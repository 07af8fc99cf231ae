"""The tiered cache: blocks by content hash on the device, in host memory and in stores."""
