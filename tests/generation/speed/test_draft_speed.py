"""Draft models that guess well: faster for one row, and no loss for eight."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from generation.speed.workload import GREEDY, TOPICS, batch_of, best_of_turns, chat_prompt
from transformers import AutoModelForCausalLM, PreTrainedModel

import hfpaged

pytestmark = pytest.mark.slow

NEW = 96


def stories(tokenizer: Any, rows: int) -> Any:
    return batch_of(tokenizer, [chat_prompt(tokenizer, f"Write a short story about {it}.") for it in TOPICS[:rows]])


def trained_on(model: PreTrainedModel, ids: torch.LongTensor, mask: torch.Tensor, first: int) -> PreTrainedModel:
    """Two layers of the model, trained to go on from position `first` as these texts do."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 2
    draft = type(model)(config)
    draft.load_state_dict(model.state_dict(), strict=False)
    draft.get_input_embeddings().requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in draft.parameters() if one.requires_grad], lr=2e-3, weight_decay=0.0)
    labels = ids.clone()
    labels[:, :first] = -100
    for _ in range(24):
        draft(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft.eval()


@pytest.fixture(scope="module")
def drafts(smollm2_path: Path, tokenizer: Any) -> dict[str, PreTrainedModel]:
    """Models that guess well: the model itself in half the memory, and a tiny one that knows the very texts."""
    target = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    target.generation_config.pad_token_id = target.generation_config.eos_token_id
    batch = stories(tokenizer, 8)
    with hfpaged.patched(target):
        texts = target.generate(**batch, max_new_tokens=NEW, **GREEDY)
    mask = torch.cat([batch.attention_mask, torch.ones(8, NEW, dtype=torch.long)], dim=1)
    return {
        "two trained layers": trained_on(target, texts, mask, batch.input_ids.shape[1]),
        "itself in bfloat16": target.to(torch.bfloat16),
    }


@pytest.mark.parametrize("rows, least", [(1, 1.15), (8, 0.9)])
@pytest.mark.parametrize("name", ["two trained layers", "itself in bfloat16"])
def test_good_drafts_are_faster_for_one_row_and_no_loss_for_eight(model, tokenizer, drafts, name, rows, least):
    batch, texts = stories(tokenizer, rows), {}
    model.patch()
    engine = hfpaged.engine(model)

    def run(how, **options):
        texts[how] = model.generate(**batch, max_new_tokens=NEW, **GREEDY, **options)

    run("plain")
    run("drafted", assistant_model=drafts[name])
    before = engine.stats()
    plain, drafted = best_of_turns([lambda: run("plain"), lambda: run("drafted", assistant_model=drafts[name])])
    after = engine.stats()
    guessed, right = (after[key] - before[key] for key in ("draft_tokens", "accepted_tokens"))
    print(
        f"{rows} rows, {name}: plain {rows * NEW / plain:.0f} tokens/s, drafted {rows * NEW / drafted:.0f}, "
        f"{right} of {guessed} guesses right"
    )
    assert torch.equal(texts["drafted"], texts["plain"])
    assert plain >= least * drafted
