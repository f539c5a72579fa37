"""Native code for CPUs, made inside the process.

In: kernels that keep their laws (`ferrite.ir.kernel.laws`). Out: LLVM text, object code, addresses of functions.
The text is complete: what is left to LLVM is registers and instructions, not the shape of the code.
"""
