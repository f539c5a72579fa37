"""Memory of a plan: how long values live, whose memory can be reused, what lies where inside of a run."""

from ferrite.schedule.memory.liveness import touched
from ferrite.schedule.memory.peak import UnknownBytes, bytes_at, peak_of

__all__ = ["UnknownBytes", "bytes_at", "peak_of", "touched"]
