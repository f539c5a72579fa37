"""The page that leads from Inductor's IR to ours: every name is there, every place and test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from_inductor.md"
NAMES = """
AssertScalar Buffer CUDATemplateBuffer Carries ChoiceCaller CodegenGraph CommBufferLayout CommBufferType ComplexView
ComputedBuffer ConcatKernel Conditional ConstantBuffer CppTemplateBuffer CuteDSLTemplateBuffer DeviceCopy
DonatedBuffer DynamicScalar DynamicSelectStorageOffset DynamicSliceSize EffectfulKernel ExternKernel ExternKernelAlloc
ExternKernelNode ExternKernelOut FallbackKernel FixedLayout FlexibleLayout GraphPartitionSignature IRNode
IndexPutFallback InplaceBernoulliFallback InplaceCopyFallback InputBuffer InputsKernel InvokeSubgraph
MemoryCheckKernel MultiOutput MultiOutputReduction MultiTemplateBuffer MutatingFirstArgExternKernel
MutationLayoutSHOULDREMOVE MutationOutput NonOwningLayout NonTensorObj NopKernel OnlineSoftmaxReduction Operation
OperationBuffer OutputSpec RandomSeeds ResizeStorageBytes ScatterFallback SetSourceTensorKernel SliceView StorageBox
Subgraph SubgraphBuffer TMADescriptor TMADescriptorExperimental TMADescriptorStable TemplateBuffer TensorBox
TritonTemplateBuffer TritonTemplateCallerBase UserDefinedTritonKernel WelfordReduction WhileLoop _AllReduceKernel
_AllReduce_Kernel _CollectiveKernel _WaitKernel class for handles self that to
""".split()  # noqa: SIM905
# Templates that are not here, and descriptors of a kind that Triton has no longer.
UNTESTED = ("CuteDSLTemplateBuffer", "TMADescriptorExperimental")
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (`[^`]+`|none) \| (.+) \|$", re.MULTILINE)
ROWS = {found[0]: found[1:] for found in ROW.findall(PAGE.read_text())}


def test_every_name_has_one_row() -> None:
    listed = [found[0] for found in ROW.findall(PAGE.read_text())]
    assert sorted(listed) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_a_place_and_a_test_that_exist(name: str) -> None:
    here, where, test = ROWS[name]
    if where == "none":
        assert here == "no class: a word of a comment"
        return
    assert (ROOT / where.strip("`")).is_file()
    if test == "none":
        assert name in UNTESTED
        return
    path, function = test.strip("`").split("::")
    defined = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert function in defined


def test_what_is_not_here_says_what_is_done_in_its_place() -> None:
    missing = {name: here for name, (here, _, _) in ROWS.items() if here.startswith("not here: ")}
    assert set(missing) == {"CUDATemplateBuffer", "CuteDSLTemplateBuffer", "CommBufferLayout", "CommBufferType"}
    assert all("torch" in here for here in missing.values())
