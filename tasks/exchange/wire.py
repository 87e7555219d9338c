"""The one version of all that processes exchange."""

WIRE_VERSION = 9
"""Raise it with every change of a ledger's table or index or of what a column holds, of run directories, trajectory
payloads and weight manifests: ledgers, payloads and workers of another version are refused."""
