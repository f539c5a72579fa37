"""Native code for CPUs, made inside the process.

In: kernels that keep their laws (`ferrite.ir.kernel.laws`). Out: LLVM text, object code, addresses of functions.
The text is complete: what is left to LLVM is registers and instructions, not the shape of the code.
"""

from ferrite.codegen.llvm.build import link, object_code
from ferrite.codegen.llvm.checks import DIVISION, OUT_OF_MEMORY
from ferrite.codegen.llvm.driver import pack_steps
from ferrite.codegen.llvm.emit import kernel_rows, kernel_text, unsupported
from ferrite.codegen.llvm.entry import TableAddress, bound
from ferrite.codegen.llvm.executable_memory import Loaded
from ferrite.codegen.llvm.image import Image, image_of, is_image
from ferrite.codegen.llvm.launches import LaunchStep, pack_launches
from ferrite.codegen.llvm.processor import Processor, host_processor, machine_text
from ferrite.codegen.llvm.runtime_symbols import openmp_library
from ferrite.codegen.llvm.types import is_narrow
from ferrite.codegen.llvm.words import IMMEDIATE

__all__ = [
    "DIVISION",
    "IMMEDIATE",
    "OUT_OF_MEMORY",
    "Image",
    "LaunchStep",
    "Loaded",
    "Processor",
    "TableAddress",
    "bound",
    "host_processor",
    "image_of",
    "is_image",
    "is_narrow",
    "kernel_rows",
    "kernel_text",
    "link",
    "machine_text",
    "object_code",
    "openmp_library",
    "pack_launches",
    "pack_steps",
    "unsupported",
]
