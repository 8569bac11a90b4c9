"""The end of attempts. Pure. Each ended attempt has one incident."""
