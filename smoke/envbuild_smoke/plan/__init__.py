"""The plan: `plan.json`, read into frozen values."""
