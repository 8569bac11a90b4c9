"""The launcher: rules of membership (`core`) and the shell around them."""
