"""What travels between devices: message types and their bounded, versioned encoding."""
