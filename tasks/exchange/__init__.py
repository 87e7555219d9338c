"""All that rollout and training share: ledger, weight versions, trajectories, and how files are written."""
