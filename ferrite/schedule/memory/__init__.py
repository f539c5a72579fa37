"""Memory of a plan: how long values live, whose memory can be reused, what lies where inside of a run."""

from ferrite.schedule.memory.liveness import accessed
from ferrite.schedule.memory.peak import bytes_at, peak_of, size_at

__all__ = ["accessed", "bytes_at", "peak_of", "size_at"]
