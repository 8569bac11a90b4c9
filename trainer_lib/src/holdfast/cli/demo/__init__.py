"""`holdfast demo`: three launchers train on one host, faults are injected, and a table shows their cost."""
