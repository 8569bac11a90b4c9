"""How worlds are formed: who proposes what, who accepts, when a world starts. Pure."""
