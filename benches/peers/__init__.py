"""Other engines as comparators, each under a Python and in a process of its own; kvpager depends on none of them."""
