"""A node: namespaces, network, configuration, first process, and the processes of its pods."""
