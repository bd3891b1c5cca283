"""One of two processes with four CPU devices each, run by test_two_processes.py: port, process id, what to do."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specprefill_jax.sharding import distributed
from specprefill_jax.sharding.mesh import check_mesh, largest_mesh, make_mesh
from specprefill_jax.sharding.rules import head_copies

TESTS = Path(__file__).parents[1]


def say(what: str) -> None:
    print(what, flush=True)


def exchange() -> None:
    """One computation that every device of both processes takes part in."""
    mesh = make_mesh()
    one = jax.make_array_from_callback((8,), NamedSharding(mesh, P("tensor")), lambda index: np.ones(8)[index])
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(one)
    assert float(total) == 8


def idle() -> None:
    exchange()
    say("ready")
    time.sleep(300)


def busy() -> None:
    exchange()
    say("ready")
    while True:
        exchange()


def fail() -> None:
    exchange()
    if jax.process_index() == 1:
        raise KeyError("a bug")
    time.sleep(300)


def agree() -> None:
    """What process 0 knows, both know; meshes have devices of both; a second start does nothing."""
    distributed.start("127.0.0.1:1", 2, 0)
    value = {"text": "naïve " * 1000, "numbers": [1, 2.5, None]}
    for sent in (value, {}, "x" * 1024):
        assert distributed.broadcast(sent if jax.process_index() == 0 else {"not": "this"}) == sent
    devices = jax.devices()
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    assert list(make_mesh(3).devices.flat) == [devices[0], devices[1], devices[4]]
    assert largest_mesh(lambda mesh: head_copies(mesh, 9, 3)).size == 3
    with pytest.raises(ValueError, match="with devices of every process; process 1 has none there"):
        check_mesh(Mesh(np.array(devices[:4]), ("tensor",)))
    time.sleep(jax.process_index())  # one ends after the other
    say("agreed")


def answer() -> None:
    """A golden whose prompt only process 0 knows, on a mesh of all eight devices; what was read of the weights."""
    from agreement import goldens, load_tiny
    from test_paper_mode import setting_of

    from specprefill_jax import SamplingParams
    from specprefill_jax.models import stacks

    read: list[float] = []
    make, fill = jax.make_array_from_callback, stacks._read
    filled: dict[int, tuple] = {}

    def watched(shape, sharding, callback):
        asked = []

        def note(index):
            part = callback(index)
            asked.append(part.size)
            return part

        array = make(shape, sharding, note)
        if not array.is_fully_replicated:
            read.append(sum(asked) / array.size)
        return array

    def counted(array, index, out, device):
        filled.setdefault(id(array), (array, []))[1].append(out.size)  # kept, lest another gets its id
        fill(array, index, out, device)

    jax.make_array_from_callback, stacks._read = watched, counted
    model = load_tiny()
    jax.make_array_from_callback, stacks._read = make, fill
    shares = [sum(sizes) / array.size for array, sizes in filled.values()]
    read += [share for share in shares if share != 4]  # norms are whole on each of the process's four devices
    assert model.main.mesh.size == model.speculator.model.mesh.size == 8
    assert len(read) >= 7 * 7
    assert set(read) == {0.5}, "each process reads the half that lies on its devices"

    known = next(np.load(case) for case in goldens() if case.stem == "tiny_17")
    ids = distributed.broadcast(known["ids"].tolist() if jax.process_index() == 0 else None)
    config = setting_of(known).config
    greedy = SamplingParams(max_tokens=len(known["tokens"]), temperature=0.0, ignore_eos=True)
    pieces = list(model.stream(ids, greedy, config))
    output = pieces[-1].output
    assert [piece.token_id for piece in pieces[:-1]] == output.token_ids
    logits = model.prefill(ids, model.select(ids, config))
    assert np.linalg.norm(logits - known["logits"]) <= 1e-3 * np.linalg.norm(known["logits"])
    fresh = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)  # without a seed
    drawn = model.generate(ids, fresh, config)
    say(
        json.dumps(
            {
                "kept": output.selection.kept_indices.tolist(),
                "tokens": output.token_ids,
                "drawn": drawn.token_ids,
            }
        )
    )


def generate() -> None:
    """scripts/generate.py with a model whose answer is known; its own flags start the processes."""
    spec = importlib.util.spec_from_file_location("test_generate", TESTS / "scripts" / "test_generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import specprefill_jax

    fake = module.Fake()
    specprefill_jax.SpecPrefill = type("Known", (), {"from_pretrained": staticmethod(lambda **options: fake)})
    sys.argv[1:] = sys.argv[4:]
    try:
        module.script.run()
    finally:
        for call in fake.calls:
            os.write(2, f"asked {call.prompt} {call.sampling.max_tokens}\n".encode())


def main() -> None:
    port, process, what = sys.argv[1:4]
    if what != "generate":
        distributed.start(f"127.0.0.1:{port}", 2, int(process))
    {"idle": idle, "busy": busy, "fail": fail, "agree": agree, "answer": answer, "generate": generate}[what]()


if __name__ == "__main__":
    main()
