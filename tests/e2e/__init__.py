"""A package, so that fixtures of scope `package` end with the folder's last test."""
