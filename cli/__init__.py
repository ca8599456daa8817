"""The edgespec command: one file a subcommand, no logic of its own."""
