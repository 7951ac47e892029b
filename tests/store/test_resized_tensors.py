"""A vocabulary that was resized: precise errors, rows in the diff, rows that are reused (case C27)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from store_states import objects, raw

from deltastore import DeltaStore
from deltastore.errors import IncompatibleStateError

ROWS, MORE, WIDTH = 32_000, 32_002, 48


def test_a_resized_vocabulary(store: DeltaStore, folder: Path) -> None:
    torch.manual_seed(0)
    old = torch.randn(ROWS, WIDTH).bfloat16()
    store.commit({"embed.weight": old, "norm": torch.ones(3)})
    before = sum(objects(folder, "packs").values())
    new = torch.cat([old, torch.randn(MORE - ROWS, WIDTH).bfloat16()])
    store.commit({"embed.weight": new, "norm": torch.ones(3)})
    assert sum(objects(folder, "packs").values()) - before < 0.6 * before  # whole chunks of the old rows are reused
    (change,) = store.diff("main~1", "main").tensors
    assert (change.status, change.shared_rows, change.changed_rows) == ("reshaped", ROWS, 0)
    assert (change.before, change.after) == (("bfloat16", (ROWS, WIDTH)), ("bfloat16", (MORE, WIDTH)))
    target = {"embed.weight": torch.zeros(MORE, WIDTH).bfloat16(), "norm": torch.zeros(3)}
    with pytest.raises(IncompatibleStateError) as caught:
        store.checkout("main~1").load_into(target)
    message = str(caught.value)
    assert "'embed.weight' is bfloat16[32002, 48], the commit has bfloat16[32000, 48] (dimension 0: 32002, not 32000)" in message
    assert "`target[:32000].copy_(snapshot['embed.weight'][:32000].load())`" in message
    assert not target["norm"].any()
    snapshot = store.checkout("main~1")  # and so it is done
    target["embed.weight"][:32000].copy_(snapshot["embed.weight"][:32000].load())
    assert raw(target["embed.weight"][:ROWS]) == raw(old)
    snapshot.load_into({"embed.weight": target["embed.weight"][:ROWS], "norm": target["norm"]})
    assert target["norm"].all()


@pytest.mark.parametrize("width", [48, 1_500_000, 7])
def test_changed_rows_are_counted(store: DeltaStore, width: int) -> None:
    """Rows that are shorter than a chunk, longer, and not aligned with its end."""
    rows = {48: 40_000, 1_500_000: 4, 7: 160_000}[width]
    torch.manual_seed(0)
    first = torch.randint(-100, 100, (rows, width), dtype=torch.int8)
    second = torch.cat([first, first[:1]])
    changed = sorted({0, rows // 3, rows // 2, rows - 1, (1 << 20) // width % rows})
    for row in changed:
        second[row] += 1
    second[0, -1] -= 1
    store.commit({"w": first, "c": first[:2].to(torch.complex128)})
    store.commit({"w": second, "c": second[:3].to(torch.complex128)})
    for pair in (("main~1", "main"), ("main", "main~1")):
        changes = {each.name: each for each in store.diff(*pair).tensors}
        assert (changes["w"].shared_rows, changes["w"].changed_rows) == (rows, len(changed))
        assert changes["c"].shared_rows == 2
        assert changes["c"].changed_rows == sum(row < 2 for row in changed)


def test_other_shapes_share_no_rows(store: DeltaStore) -> None:
    store.commit({"turned": torch.ones(3, 4), "scalar": torch.tensor(1.0), "wide": torch.ones(2), "none": torch.ones(0, 3)})
    store.commit({"turned": torch.ones(4, 3), "scalar": torch.ones(1), "wide": torch.ones(3).double(), "none": torch.ones(2, 3)})
    found = {each.name: (each.status, each.shared_rows, each.changed_rows) for each in store.diff("main~1", "main").tensors}
    assert found == {
        "turned": ("reshaped", None, None),
        "scalar": ("reshaped", None, None),
        "wide": ("reshaped", None, None),
        "none": ("reshaped", 0, 0),
    }
    target = {"turned": torch.ones(3, 5), "scalar": torch.ones(1, 1), "wide": torch.ones(3), "none": torch.ones(2, 3)}
    with pytest.raises(IncompatibleStateError) as caught:
        store.checkout().load_into(target)
    message = str(caught.value)
    assert "'turned' is float32[3, 5], the commit has float32[4, 3] (dimension 0: 3, not 4, dimension 1: 5, not 3)" in message
    assert "'scalar' is float32[1, 1], the commit has float32[1] (2 dimensions, not 1)" in message
    assert "Make a target of the shapes of the commit" in message
