"""From programs to source text.

In: a verified `HostProgram`. Out: Python source of one boxed function, readable, with the model line of each call.
"""

from ferrite.codegen.host import HostSource, print_host

__all__ = ["HostSource", "print_host"]
