# Everything that a fresh machine needs: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
READY = $(VENV)/.ready
RUN = $(VENV)/bin/
# Most of what is installed is never imported; Python compiles the rest when it is.
INSTALL = $(RUN)python -m pip install --quiet --no-compile
DEMO = runs/demo
NUMBERS = runs/numbers
# Tests of a file share what they set up, so they run in one process.
JOBS = -n 2 --dist loadfile
CALL_TRANSFORMERS = $(addprefix tests/,plugin training translation interop evaluation)

.PHONY: demo test test-slow test-storm test-oldest newest test-newest test-mutants test-all lint \
	docs clean

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	$(INSTALL) $(UPGRADE) --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

# German number words to English ones: trains, scores unseen numbers, translates a few.
demo: $(READY)
	rm -rf $(DEMO)
	$(RUN)python scripts/number_words.py make $(NUMBERS)
	$(RUN)vanilla-transformer train --output_dir $(DEMO) \
		--train $(NUMBERS)/train.de $(NUMBERS)/train.en \
		--validation $(NUMBERS)/validation.de $(NUMBERS)/validation.en \
		--config encoder_layers=2 decoder_layers=2 dropout=0.1 --vocab_size 400 \
		--metric_for_best_model exact_match --learning_rate 3e-3 --warmup_steps 400 \
		--lr_scheduler_type linear \
		--max_tokens_per_batch 4096 --num_train_epochs 10 --max_minutes 3.5
	$(RUN)vanilla-transformer evaluate --model $(DEMO) --name numbers \
		--test $(NUMBERS)/test.de $(NUMBERS)/test.en --output $(DEMO)/test.en
	$(RUN)python scripts/number_words.py score $(NUMBERS) $(DEMO)/test.en
	$(RUN)vanilla-transformer translate --model $(DEMO) \
		zweihundertfünfundvierzig neunundneunzigtausendeins siebenhunderttausenddreizehn
	@echo "The model folder is $(DEMO); its card is $(DEMO)/README.md."

# One thread for each of the two processes: idle OpenMP threads that spin would slow both down.
test: $(READY)
	OMP_NUM_THREADS=1 $(RUN)python -m pytest -m "not slow" $(JOBS) $(TESTS)

# What takes longer, or fetches Transformers' own tests from the package index. SHARE=2/3 takes every
# third of the examples and of the cases of other slow tests, beginning with the second.
test-slow: $(READY)
	OMP_NUM_THREADS=1 $(RUN)python -m pytest -m slow $(JOBS) $(if $(SHARE),--share $(SHARE))

# 100 rounds of kills, full disks and damaged files; `make test-slow` has the first few.
test-storm: $(READY)
	STORM_ROUNDS=100 $(RUN)python -m pytest -m slow -n 2 tests/storm

# With another release of Transformers: the quick tests of what calls it (SHARE=2/3: of every third
# file, beginning with the second), its own common tests on our classes, then folders that the two
# releases exchange. The oldest is the lowest that is allowed; the newest is what pip installs today.
OTHER = OMP_NUM_THREADS=1 .venv-$(1)/bin/python -m pytest -m slow tests/plugin/test_hf_suite.py \
	&& OMP_NUM_THREADS=1 OTHER_PYTHON=.venv-$(1)/bin/python \
	$(RUN)python -m pytest -s -m slow tests/plugin/test_releases.py
TESTS_OF_OTHER = TESTS="$(CALL_TRANSFORMERS) $(if $(SHARE),--share_of_files $(SHARE))"

test-oldest: $(READY)
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt $(TESTS_OF_OTHER)
	$(call OTHER,oldest)

test-newest: $(READY) newest
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt $(TESTS_OF_OTHER)
	$(call OTHER,newest)

# The environment of the newest releases, brought up to date.
newest:
	rm -f .venv-newest/.ready
	$(MAKE) .venv-newest/.ready VENV=.venv-newest CONSTRAINTS=constraints-newest.txt \
		UPGRADE="--upgrade --upgrade-strategy eager"

# Breaks the repository in one place at a time: each mutant must fail a test that passes otherwise.
# SHARE=2/6 takes every sixth, beginning with the second, and assumes that all tests have passed.
test-mutants: $(READY)
	$(RUN)python checks/check_mutants.py --jobs 2 $(if $(SHARE),--share $(SHARE) --skip-unbroken)

test-all: export WITH_MARIAN = 1
test-all: docs test test-slow test-oldest test-newest test-mutants

lint: $(READY)
	$(RUN)ruff format --check .
	$(RUN)ruff check .
	$(RUN)mypy

# The site, in build/site; a broken link or an unknown directive is an error.
docs: $(READY)
	$(INSTALL) --constraint $(CONSTRAINTS) --editable '.[docs]'
	$(RUN)python -m sphinx -q -W --keep-going -E -c docs -b html . build/site

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest $(DEMO) $(NUMBERS)
