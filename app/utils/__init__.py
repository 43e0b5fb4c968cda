"""Helpers without state, used by several packages: files, lengths, net, process, tasks."""
