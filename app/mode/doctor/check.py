"""`mode=doctor`: would this configuration run on this machine? A line for each thing that has stopped runs elsewhere.

Always holds: nothing is started, fetched or written; every line that is not ok says what to do; the exit code is 1
where a line fails.
"""

from app.config import RunConfig
from app.device import device_of
from app.mode.doctor.device import environment, hardware
from app.mode.doctor.finding import Finding, Verdict, table
from app.mode.doctor.machine import machine, reachable
from app.mode.doctor.software import software

FAILED = 1


def examine(config: RunConfig) -> list[Finding]:
    """Every finding, in the order in which they are worth mending."""
    device = device_of(config.device.kind)
    parts = (software(config, device), hardware(config, device), environment(config, device))
    return [finding for part in (*parts, machine(config), reachable(config)) for finding in part]


def report(config: RunConfig) -> tuple[str, int]:
    """The table and the exit code."""
    findings = examine(config)
    failed = any(finding.verdict is Verdict.fail for finding in findings)
    return table(findings), FAILED if failed else 0
