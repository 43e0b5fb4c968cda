"""Metrics, samples and reports: run folder, console, dashboards, alarms."""
