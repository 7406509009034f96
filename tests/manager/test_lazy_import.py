"""`import kvpager` and the manager load neither torch nor numpy before a tensor is asked for."""

import subprocess
import sys

import pytest

USE = """
manager = KVBlockManager(8, 4)
manager.create_sequence(1)
assert manager.append_token(1) == 0
assert manager.append_tokens(1, 5) == [1, 2, 3, 4, 5]
manager.fork_sequence(1, 2)
manager.append_token(2)
assert manager.take_copies() == [(1, 2)]
assert manager.sequences[2].block_table == (0, 2)
from array import array
slots = array("q", [0, 0])
manager.slot_mapping_for_append([1, 2], out=slots)
manager.get_block_table_tensor(array("q", [1, 2]), out=array("i", [0] * 4))
assert manager.invariants_ok()
repr(manager), manager.stats
"""
LOOK = "import sys; loaded = {'torch', 'numpy'} & set(sys.modules); assert not loaded, loaded"


@pytest.mark.parametrize(
    "code",
    [
        "import kvpager",
        "import kvpager; kvpager.__version__; kvpager.KVBlockManager; kvpager.SequenceState; kvpager.errors",
        f"from kvpager import KVBlockManager{USE}",
        f"from kvpager.reference import KVBlockManager{USE}",
    ],
    ids=["import", "names", "rust manager", "reference manager"],
)
def test_neither_torch_nor_numpy_is_loaded(code):
    subprocess.run([sys.executable, "-c", f"{code}\n{LOOK}"], check=True)
