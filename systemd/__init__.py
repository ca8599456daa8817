"""The shipped systemd units: text, no code; edgespec.daemon.service installs them."""
