from vanilla_transformer_tools.commands import main


def test_env_prints_versions_threads_and_caches(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VANILLA_TRANSFORMER_CACHE", raising=False)

    main(["env"])

    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split("  ", 1) for line in lines)
    assert facts["vanilla-transformer"].strip()[0].isdigit()
    assert facts["OMP_NUM_THREADS"].strip() == "3"
    assert facts["conversions"].strip() == "~/.cache/vanilla_transformer"


def test_env_says_that_nothing_is_kept(monkeypatch, capsys):
    monkeypatch.setenv("VANILLA_TRANSFORMER_CACHE", "")

    main(["env"])

    assert capsys.readouterr().out.count("nothing is kept") == 2
