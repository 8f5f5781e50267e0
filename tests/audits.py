"""An audit report with names that are hostile to HTML."""

from __future__ import annotations

from saved import golden_report

from cgplan.reports.records import AuditedKey, AuditReport, Finding, OwnerRecord

HOSTILE = "</script><img src=x onerror=alert(1)>"


def audit_report() -> AuditReport:
    capture = golden_report("capture_gpu")
    keys = [{"mode": r.mode, "descriptor": r.descriptor} for r in capture.records]
    counts = {
        "graphs": 1,
        "nodes": 7,
        "opaque": 1,
        "words": 31,
        "kinds": {"graph pool": 30, "free block": 1},
    }
    found = {
        "problem": "free block",
        "graph": 0,
        "node": 3,
        "kernel": HOSTILE,
        "operator": "aten::mm",
        "address": 4096,
    }
    owners = [(f"layers[{i}].weight", "parameter or buffer", 2**20) for i in range(2)] + [
        (HOSTILE, "library", None)
    ]
    return AuditReport(
        environment=capture.environment,
        keys=tuple(AuditedKey(**key, **counts, kernels={HOSTILE: 4, "gemm": 3}) for key in keys),
        owners=tuple(
            OwnerRecord(name=n, kind=k, nbytes=b, words=9, keys=len(keys)) for n, k, b in owners
        ),
        findings=(
            Finding(**keys[0], **found, line="model.py:12", detail="freed after the capture"),
        ),
        read_seconds=1.5,
        classify_seconds=0.25,
    )
