"""Functions of vectors as LLVM text: `table` has them all, `calls` is how expressions reach them."""
