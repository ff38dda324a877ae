# ruff: noqa: RUF001
"""Where sentences end: in many scripts, and not after abbreviations, numbers and quotations."""

from pathlib import Path

import pytest

from vanilla_transformer_tools.text.sentences import has_inner_end, split_line


@pytest.mark.parametrize(
    "sentences",
    [
        ["Dr. Smith came.", " He walked 3.5 km."],
        ["He met Mr. J. R. Brown.", " It was late."],
        ["We use tools, e.g. hammers.", " They work."],
        ["He is in the U.S. Army.", "\t It is big."],
        ["See Fig. 3.", " Done."],
        ["Wait... what?", " I see…", " Yes."],
        ['"Stop!" he said.', " Then he left."],
        ['"Stop it."', ' "No."', " (Yes.)", " OK."],
        ["1. First point.", " 2. Second point."],
        ["Is it?!", " Yes."],
        # Without capitals, a small letter begins a sentence.
        ["zwei.", " drei.", "  vier."],
        ["Dr. Müller kam am 3. Mai.", " Es war schön."],
        ["Das war im 19. Jahrhundert.", " Er ist 30.", " Du auch?"],
        ["Wir sehen z.B. Hunde und z. B. Katzen.", " Sie bellen usw.", " Ja."],
        ["„Komm!“, rief er.", " Sie kam."],
        ["Quoi ?", " Oui !", " M. Dupont."],
        ["Он жил в 1990 г. в Москве.", " Потом уехал."],
        ["你好。", "我是学生！", "真的吗？", "好。"],
        ["「行くよ。」と言った。", "彼は来た。"],
        ["यह किताब है।", " वह घर है।"],
        ["هل أنت بخير؟", " نعم."],
        ["یہ کتاب ہے۔", " وہ گھر ہے۔"],
        ["Սա գիրք է։", " Նա տուն է։"],
        ["ይህ መጽሐፍ ነው።", "ያ ቤት ነው።"],
        ["ဒါစာအုပ်ပါ။", "ဒါအိမ်ပါ။"],
        ["នេះជាសៀវភៅ។", " នោះជាផ្ទះ។"],
        ["འདི་དེབ་རེད།", " དེ་ཁང་པ་རེད།"],
        ["Τι κάνεις;", " Καλά."],
        # Blanks are the marks of Thai and Lao, but not around numbers.
        ["นี่คือหนังสือ", " นั่นคือบ้าน 3 หลัง"],
        ["นี่คือหนังสือนั่นคือบ้าน"],
        # Marks alone are no sentence.
        ["Ab.", " ... cd !!  "],
        ["......  ---- . ."],
        ["one; two. "],
    ],
)
def test_line_is_cut_after_its_sentences(sentences):
    assert split_line("".join(sentences)) == sentences
    assert has_inner_end("".join(sentences)) == (len(sentences) > 1)


def test_lines_of_ten_languages_are_cut_where_a_person_cuts_them():
    lines = Path(__file__).with_name("sentences.tsv").read_text(encoding="utf-8").splitlines()
    marked = [line.split("\t")[1].split("|") for line in lines]

    wrong = [
        sentences
        for sentences in marked
        if [one.strip() for one in split_line(" ".join(sentences))] != sentences
    ]

    assert len(marked) == 100
    # No rule knows that a Swedish street may end in `g.`.
    assert wrong == [["Han bor på Storg. 5.", "Det är nära."]]
