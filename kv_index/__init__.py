"""Who holds which prefix: pure data structures, no I/O, no clock (time is an argument)."""
