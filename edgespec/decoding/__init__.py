"""The decode step: requests, the coordinator that schedules them, stages that run rows."""
