"""Prompts read back from their text: posteriors against brute force over the generative model, and quadrature."""

import itertools
import re

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from interp.pretrained import load_pretrained
from interp.prompts import Dice, Natural, Sula, WordBijection
from interp.prompts.base import PromptError
from interp.prompts.sula import CLASSES


class Tokenizer:
    """A token a word with its leading space, or a mark."""

    def __init__(self):
        self.vocabulary = {}

    def __call__(self, text, add_special_tokens=True):
        pieces = re.findall(r" ?\w+|[^\w\s]| =", text)
        return {"input_ids": [self.vocabulary.setdefault(piece, len(self.vocabulary)) for piece in pieces]}


@pytest.fixture(scope="module")
def smollm2():
    return load_pretrained("smollm2").tokenizer


@pytest.fixture(params=["words", "smollm2"])
def tokenizer(request):
    return Tokenizer() if request.param == "words" else request.getfixturevalue("smollm2")


FAMILIES = [Sula(), Sula(fillers=False, flip=0.3), WordBijection(), Dice(), Dice(sides=6, a=0.5)]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_tokens_are_the_text_and_answers_are_due_where_they_are_asked(tokenizer, family):
    batch = family.sample(tokenizer, 6, seed=1)
    for text, tokens in zip(batch.text, batch.tokens, strict=True):
        assert tokenizer(text)["input_ids"] == tokens.tolist()
    assert torch.allclose(batch.posterior.sum(-1), torch.ones(()).double())
    following = batch.tokens[0][batch.position[0, :-1] + 1]
    assert set(following.tolist()) <= {
        *batch.answers.tolist(),
        *tokenizer(" none", add_special_tokens=False)["input_ids"],
    }


def test_sula_posterior_is_bayes_over_the_two_pairings():
    batch = Sula(shots=6).sample(Tokenizer(), 40, seed=2)
    labels = [" dax", " wug"]
    of_class = {word: i for i, line in enumerate(CLASSES.values()) for word in line.split()}
    for row, text in enumerate(batch.text):
        lines = re.findall(r"(\w+) =(?: (\w+),)?", text)
        weight = np.array([0.5, 0.5])
        for q, (word, shown) in enumerate(lines):
            posterior = weight / weight.sum()
            for label in (0, 1):
                expected = sum(p for pairing, p in enumerate(posterior) if of_class[word] ^ pairing == label)
                assert batch.posterior[row, q, label] == pytest.approx(expected, abs=1e-12)
            if shown and shown != "none":
                likelihood = [0.9 if labels[of_class[word] ^ pairing] == f" {shown}" else 0.1 for pairing in (0, 1)]
                weight = weight * likelihood


def test_word_bijection_posterior_is_bayes_over_all_bijections():
    family = WordBijection(symbols=3, pairs=5)
    batch = family.sample(Tokenizer(), 40, seed=3)
    for row, text in enumerate(batch.text):
        values = re.search(r"Values:(.*)\. Pairs", text).group(1).split(",")
        pairs = re.findall(r"( \w+) =(?:( \w+),)?", text.split("Pairs:")[1])
        keys = sorted({key for key, _ in pairs})
        keys += [f"unused {i}" for i in range(3 - len(keys))]
        for q, (key, _) in enumerate(pairs):
            fitting = [
                image
                for image in itertools.permutations(values)
                if all(image[keys.index(k)] == v for k, v in pairs[:q])
            ]
            for i, value in enumerate(values):
                expected = np.mean([image[keys.index(key)] == value for image in fitting])
                assert batch.posterior[row, q, i] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("a", [0.5, 1.0, 3.0])
def test_coin_predictive_is_the_integral_over_its_bias(a):
    family = Dice(rolls=5, a=a)
    batch = family.sample(Tokenizer(), 8, seed=4)
    for row in range(8):
        for q in range(6):
            rolls = batch.targets[row, :q]
            heads, tails = int((rolls == 0).sum()), int((rolls == 1).sum())

            def weighted(x, power, heads=heads, tails=tails):
                # x = sin^2: the density at the ends stays finite
                p = np.sin(x) ** 2
                jacobian = 2 * np.sin(x) * np.cos(x)
                return p ** (a - 1 + heads + power) * (1 - p) ** (a - 1 + tails) * jacobian

            top, bottom = (quad(weighted, 0, np.pi / 2, args=(power,))[0] for power in (1, 0))
            assert batch.posterior[row, q, 0] == pytest.approx(top / bottom, abs=1e-7)


def test_bias_and_outcomes_follow_the_prior():
    targets = Dice(sides=6, a=2.0, rolls=2).sample(Tokenizer(), 4000, seed=5).targets
    assert np.bincount(targets.flatten(), minlength=6) / targets.numel() == pytest.approx(np.full(6, 1 / 6), abs=0.015)
    # two rolls of one die agree with probability (a + 1) / (6 a + 1)
    assert (targets[:, 0] == targets[:, 1]).double().mean() == pytest.approx(3 / 13, abs=0.02)


def test_streams_do_not_depend_on_the_batch_size():
    family, tokenizer = Sula(), Tokenizer()
    whole = family.sample(tokenizer, 8, seed=6)
    part = family.sample(tokenizer, 3, seed=6, start=5)
    assert part.text == whole.text[5:]
    assert torch.equal(part.posterior, whole.posterior[5:])


def test_natural_prompts_are_distinct_and_know_their_domain(smollm2):
    family = Natural()
    batch = family.sample(smollm2, len(family.available), seed=0)
    assert len(set(batch.text)) == len(batch.text) >= 200
    assert len(set(batch.domain)) == 5
    row = int(batch.length.argmin())
    assert batch.tokens[row][: batch.length[row]].tolist() == smollm2(batch.text[row])["input_ids"]
    assert (batch.tokens[row][batch.length[row] :] == -1).all()
    assert batch.position[row].tolist() == list(range(int(batch.length[row]) - 4, int(batch.length[row])))


def test_bad_prompts_get_one_clear_line():
    with pytest.raises(PromptError, match="must be single tokens, but of 13 candidates this tokenizer keeps 0"):
        Sula().sample(lambda text, add_special_tokens: {"input_ids": [ord(letter) for letter in text]}, 1)
    with pytest.raises(PromptError, match="unknown domain 'sport'"):
        Natural("sport")
    with pytest.raises(PromptError, match="ask for fewer"):
        Natural().sample(Tokenizer(), 10_000)
    for bad in (lambda: Sula(flip=0.5), lambda: Dice(sides=3), lambda: WordBijection(symbols=1), lambda: Dice(a=0)):
        with pytest.raises(PromptError):
            bad()
