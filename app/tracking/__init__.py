"""Where the numbers go: console, files, dashboards."""
