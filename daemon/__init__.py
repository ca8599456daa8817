"""The processes that run on the devices: configuration in, exit code out."""
