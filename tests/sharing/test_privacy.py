"""What a record and a file would tell about their user."""

import json
import string
from base64 import b64encode
from random import Random
from time import process_time

import pytest

from vanilla_transformer_tools.sharing.privacy import MASK, clean_record, find_disclosures

HUB_TOKEN = "hf_" + "aB3" * 11
AWS_KEY = "AKIA" + "Z9" * 8


@pytest.fixture(autouse=True)
def _known_environment(monkeypatch):
    """The machine of a user without secrets whose home is /srv/jo."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/srv/jo")


def cleaned_command(*words):
    return clean_record({"command": list(words)})["command"]


# Secrets in a record


def test_value_of_an_option_for_a_token_is_masked():
    for option in ("--hub_token", "--push-to-hub-token"):
        assert cleaned_command(option, "short", "--seed", "3") == [option, MASK, "--seed", "3"]
        assert cleaned_command(f"{option}=short", "--seed=3") == [f"{option}={MASK}", "--seed=3"]
    kept = ["--max_tokens_per_batch", "800", "--tokenizer_kind=char", "--config", "bos_token_id=1"]
    assert cleaned_command(*kept) == kept


def test_what_looks_like_a_secret_is_masked_wherever_it_stands():
    record = {"settings": {"license": f"see {HUB_TOKEN} here"}, "arguments": {"to": [AWS_KEY]}}
    assert clean_record(record) == {
        "settings": {"license": f"see {MASK} here"},
        "arguments": {"to": [MASK]},
    }
    assert "pass" not in cleaned_command("https://jo:pass@host.org/x")[0]


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"])
def test_secret_of_the_environment_is_masked_wherever_it_stands(monkeypatch, name):
    monkeypatch.setenv(name, "k=open sesame")

    record = clean_record({"a": ["--run_name=k=open sesame"], "b": {"c": "(k=open sesame)"}})

    assert record == {"a": [f"--run_name={MASK}"], "b": {"c": f"({MASK})"}}


def test_short_values_and_other_variables_are_no_secrets(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "sixteen")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallelism")
    monkeypatch.setenv("YOUR_TOKEN", "seventeen")
    words = ["sixteen", "parallelism", "seventeens"]

    assert cleaned_command(*words) == words


def test_fields_for_tokens_are_masked_at_any_depth():
    record = {"arguments": {"hub_token": "short", "deepspeed": {"wandb": {"api_key": "short"}}}}

    assert clean_record(record) == {
        "arguments": {"hub_token": MASK, "deepspeed": {"wandb": {"api_key": MASK}}}
    }
    assert cleaned_command('{"apiKey": "short", "a": "b"}') == [f'{{"apiKey": "{MASK}", "a": "b"}}']


# Paths in a record


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/jo/bin/vanilla-transformer", "vanilla-transformer"),
        ("/home/jo/my data/train.de", "train.de"),
        ("/home/jo/runs/de-en/", "de-en"),
        ("~/runs/de-en", "de-en"),
        ("../jo/de-en", "de-en"),
        (r"C:\Users\jo\run", "run"),
        ("--output_dir=/home/jo/runs/de-en", "--output_dir=de-en"),
        ('{"path": "/home/jo/a", "n": [1, "D:/b/c"]}', '{"path": "a", "n": [1, "c"]}'),
        ("file:///home/jo/a", "a"),
        ("in:/home/jo/b,/home/jo/c", "in:b,c"),
        ("/", "/"),
    ],
)
def test_paths_become_names(path, name):
    assert cleaned_command(path) == [name]


@pytest.mark.parametrize(
    "text",
    ["me/pairs", "https://host.org/a/b", "s3://bucket/a/b", "1 / 2", "and/or", "translation.de"],
)
def test_what_is_no_path_of_the_machine_is_kept(text):
    assert cleaned_command(text) == [text]


def test_checksums_keep_files_of_one_name_apart():
    record = {
        "command": ["--train=b/x.de", "a/x.de"],
        "settings": {"train": ["a/x.de", "/data/x.en"], "validation": ["b/x.de", "b/x.en"]},
        "sha256": {"a/x.de": "1", "/data/x.en": "2", "b/x.de": "3", "b/x.en": "4", "c/x.de": "5"},
    }

    assert clean_record(record) == {
        "command": ["--train=x.de (2)", "x.de"],
        "settings": {"train": ["x.de", "x.en"], "validation": ["x.de (2)", "x.en (2)"]},
        "sha256": {"x.de": "1", "x.en": "2", "x.de (2)": "3", "x.en (2)": "4", "x.de (3)": "5"},
    }


# Files


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (HUB_TOKEN, "a token of the Hub"),
        (AWS_KEY, "AWS Access Key"),
        ("postgres://jo:pass@host", "Basic Auth Credentials"),
        ("/var/home/jo", "a home directory, '/var/home/jo'"),
        ("/mnt/c/Users/jo/x", "a home directory, '/mnt/c/Users/jo'"),
        ("file:///root/x", "a home directory, '/root'"),
        (json.dumps(r"C:\Users\jo\x"), r"a home directory, 'C:\\\\Users\\\\jo'"),
        ("/srv/jo", "a home directory, '/srv/jo'"),
    ],
)
def test_disclosure_is_found_with_its_line(text, what):
    assert find_disclosures(f"first\nsecond\nin '{text}' \n") == [(3, what)]


WORD = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zAbCdEfGhIjKlMnOpQrStUvWxYz0123456789" * 2
# Made of parts, so that no scanner takes this file for a leak.
TOKENS = {
    "GitHub": "ghp_" + "aB3" * 12,
    "a key": "-----BEGIN PRIVATE " + "KEY-----",
    "a JSON Web Token": ".".join(
        [*(b64encode(part).decode().rstrip("=") for part in (b'{"alg":"HS256"}', b'{"a":1}')), WORD]
    ),
}
ASSIGNED = {"JSON": '{"password": "open sesame"}'}


@pytest.mark.parametrize("kind", TOKENS | ASSIGNED)
def test_secret_of_a_provider_is_found_and_masked(kind):
    secret = (TOKENS | ASSIGNED)[kind]

    found = find_disclosures(f"first\n{secret}\n")
    masked = cleaned_command(f"see {secret} here")[0]

    assert {line for line, _ in found} == {2}
    assert secret not in str(found)
    assert MASK in masked
    assert not any(part in masked for part in (WORD[:20], WORD[-20:], "sesame"))
    in_vocabulary = find_disclosures(f'"{secret}": 1', is_vocabulary=True)
    assert bool(in_vocabulary) == (kind in TOKENS)


def test_large_vocabulary_of_odd_words_is_searched_quickly_and_discloses_nothing():
    random = Random(1)
    letters = string.ascii_letters + string.digits + "_-./:@=+?&ß▁Ġ"
    words = ["".join(random.choices(letters, k=random.randrange(1, 25))) for _ in range(32000)]
    words += ["APARTMENTHAUS", "/home/jo", "https://jo:pass@host.org", "//x" * 20000]
    text = json.dumps({word: number for number, word in enumerate(words)}, indent=0)

    started = process_time()
    found = find_disclosures(text, is_vocabulary=True)

    assert found == []
    # It takes one second.
    assert process_time() - started < 20


def test_secret_of_the_environment_is_found_and_named_by_its_variable(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "open sesame")

    assert find_disclosures("\nwith open sesame.\nopen sesames") == [
        (2, "the value of WANDB_API_KEY")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Bearer authentication/authorization is explained elsewhere.",
        "https://host.org/home/page and https://host.org/Users/jo and tree/root/x",
        "hf_hub_download, hf_xet, sk-learn, sk-some-long-title-of-a-page",
        'password = None, api_key="", {"secret": "<secret>"}',
        "Run it in ~/runs, or in /srv/joanna.",
        'AutoModel.from_pretrained("me/model", token=True)',
    ],
)
def test_ordinary_text_discloses_nothing(text):
    assert find_disclosures(text) == []


def test_vocabulary_may_hold_paths_and_words_of_its_text_but_no_tokens(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "▁sesame▁")
    words = ["▁/home/jo", "▁sesame▁", "scheme://[user:passwd@]proxy", HUB_TOKEN]
    text = json.dumps(words, indent=0, ensure_ascii=False).removeprefix("[\n")

    assert find_disclosures(text, is_vocabulary=True) == [(4, "a token of the Hub")]
    assert [line for line, _ in find_disclosures(text)] == [1, 2, 4]
