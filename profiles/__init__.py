"""The shipped device profiles: data, no code; edgespec.daemon.profiles reads them."""
