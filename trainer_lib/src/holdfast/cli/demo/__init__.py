"""`holdfast demo`: three launchers on one host train, are hurt on purpose, and a table says what it cost."""
