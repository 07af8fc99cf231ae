"""Order between streams, checked: the order checker, and what it knows of bytes and clocks."""
