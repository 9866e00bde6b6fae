"""Measurements that print numbers only when the tests of what they measure are green: `make bench`."""
