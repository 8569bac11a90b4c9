module holdfast.dev/testbed/tools/pause

go 1.26.0
