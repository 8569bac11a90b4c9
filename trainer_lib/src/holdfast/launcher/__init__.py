"""The launcher: the membership state machine (`membership`) and the modules that carry out its decisions."""
