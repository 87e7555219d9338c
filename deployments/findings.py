"""What the doctor finds, and how it is printed. Needs the standard library only."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TextIO


class Verdict(StrEnum):
    """How bad a finding is: `FAIL` keeps the laptop run from working, `WARN` may."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what is, and what to do where that is not well."""

    name: str
    verdict: Verdict
    what: str
    remedy: str = ""


def show(findings: list[Finding], out: TextIO) -> None:
    """Print one line a finding, the remedy below it."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict:<4}  {finding.name:<{width}}  {finding.what}", file=out)
        if finding.remedy:
            print(f"{'':<4}  {'':<{width}}  → {finding.remedy}", file=out)
