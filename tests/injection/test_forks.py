"""Models in processes that were forked or spawned from one that has computed: those loaded there work, inherited ones are refused.

    pytest --long tests/injection/test_forks.py

The short form is that of the kernels alone, in tests/cpu_backend/test_runtime.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, os, sys
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from moegraft.injection import optimize_and_load

def answer(model):
    torch.set_num_threads(2)
    ids = model.generate(torch.tensor([[5, 17, 33, 60]]), do_sample=False, max_new_tokens=12, min_new_tokens=12, pad_token_id=0)
    assert model.moegraft.statistics()["decode_steps"]["replayed_steps"] > 0
    return ids.tolist()

def loaded():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, initializer_range=0.3)
    return optimize_and_load(AutoModelForCausalLM.from_config(config).eval(), "cpu", progress=False, threads=2)

def worker(pipe):
    pipe.send(answer(loaded()))

def inherited(model, pipe):
    try:
        pipe.send(answer(model))
    except RuntimeError as error:
        pipe.send(str(error))

def run(context, target, *arguments):
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there))
    process.start()
    found = here.recv() if here.poll(100) else "it hangs"
    process.join(10)
    return found

if __name__ == "__main__":
    model = loaded()
    expected = answer(model)
    fork = multiprocessing.get_context("fork")
    assert run(fork, worker) == expected  # as servers that fork their workers do
    assert "load the model, in the child process, or start processes by spawn" in run(fork, inherited, model)
    assert answer(model) == expected, "the parent goes on"
    assert run(multiprocessing.get_context("spawn"), worker) == expected
    print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_models_after_a_fork(tmp_path: Path, long: bool) -> None:
    if not long:
        pytest.skip("in the long form (--long)")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr
