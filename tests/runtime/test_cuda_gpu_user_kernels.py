"""On a GPU: Triton kernels of the user's in compiled functions, launched by Triton, and tuning by the command line."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import ferrite
from ferrite.__main__ import main
from ferrite.tune import parsed
from tests.triton_kernels import ON_A_GPU

pytestmark = ON_A_GPU

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from tests.targets.test_user_kernels import doubled_in_place, guessed, plain, triton_sum, tuned, with_warps

    @triton.jit
    def doubled_by_descriptor(source, target, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK
        target.store([row, 0], 2 * source.load([row, 0]))

    def by_descriptors(x, y):
        from triton.tools.tensor_descriptor import TensorDescriptor

        out = torch.empty_like(x)
        views = [TensorDescriptor.from_tensor(each.view(-1, 64), [16, 64]) for each in (x, out)]
        doubled_by_descriptor[(x.numel() // 1024,)](*views, BLOCK=16)
        return out + 3 * y - x

    KERNELS = {
        "plain": plain,
        "warps": with_warps,
        "tuned": tuned,
        "guessed": guessed,
        "operator": lambda x, y: triton_sum(x, y),
        "descriptors": by_descriptors,
    }
else:
    KERNELS = {}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name, recorded):
    function = KERNELS[name]

    def model(x, y):
        return torch.relu(function(x.tanh() * 2, y + 1)).softmax(-1) + x

    options = {"strict": True, "cuda_graphs": recorded}
    f = torch.compile(model, backend="ferrite", options=options, fullgraph=True)
    for _ in range(4):
        x, y = torch.randn(4096, device="cuda"), torch.randn(4096, device="cuda")
        torch.testing.assert_close(f(x, y), model(x, y), rtol=1e-5, atol=1e-5)
    record = ferrite.last_compile()
    assert len(record.kernels) == 2
    assert "clone" not in record.graphs[0].source
    if recorded:
        assert record.recordings[0].replayed == 3


def test_a_kernel_writes_to_an_input():
    def model(x, y):
        doubled_in_place[(2,)](x, x.numel(), BLOCK=32)
        return x + y

    x, y = torch.randn(50, device="cuda"), torch.randn(50, device="cuda")
    wanted = 2 * x
    result = torch.compile(model, backend="ferrite", options={"strict": True}, fullgraph=True)(x, y)
    assert torch.equal(x, wanted)
    assert torch.equal(result, wanted + y)


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(256, 512)

    def forward(self, x):
        return self.first(x).relu()
"""


def test_a_model_is_tuned_by_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    given = ["tune", "net.py:Net", "bf16[32,256]", "--dtype", "bf16", "-o", "record.txt"]
    assert main([*given, "--seconds", "0"]) == 1
    assert main(given) == 0
    assert len(parsed((tmp_path / "record.txt").read_text()).products) == 1
    assert "1 product measured" in capsys.readouterr().out
