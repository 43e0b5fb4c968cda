r"""Answers with the verdict of a careful human grader, and where our verdict or math-verify's differs from it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Graded:
    """Completions for one reference answer."""

    reference: str
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


POINTS = [  # decimal points, also leading ones
    Graded(
        "5", right=[r"\boxed{5.}", "#### 5.0"], wrong=[r"\boxed{.5}", r"\boxed{-.5}", "The answer is .5", "#### .5"]
    ),
    Graded("0.5", right=[r"\boxed{.5}", r"\boxed{x = .5}", "#### $.50", r"\boxed{\text{.5}}"], wrong=[r"\boxed{-.5}"]),
    Graded(".5", right=[r"\boxed{0.5}", "The answer is .5.", r"\boxed{\frac12}"], wrong=[r"\boxed{5}", "#### 5"]),
    Graded("-0.5", right=[r"\boxed{-.5}", r"\boxed{-\frac{1}{2}}"], wrong=[r"\boxed{.5}", r"\boxed{-5}"]),
    Graded("75", wrong=[r"it costs \boxed{\$.75}", r"\boxed{$.75}", r"\boxed{7.5}"]),
    Graded("0.75", right=[r"\boxed{$.75}", r"\boxed{\$.75}"]),
    Graded("25", wrong=["#### .25", "#### about .25 dollars"]),
    Graded(".25", right=["#### 0.25", "#### .25"]),
    Graded("2.5", right=[r"\boxed{2.50}", r"\boxed{5/2}"], wrong=[r"\boxed{25}"]),
    Graded("0.05", right=[r"\boxed{\frac{1}{20}}"], wrong=[r"\boxed{0.5}"]),
    Graded("0.333", wrong=[r"\boxed{1/3}"]),
    Graded("1/3", right=[r"\boxed{0.333333}"], wrong=[r"\boxed{0.33}"]),
    Graded("0.0000001", right=[r"\boxed{10^{-7}}"], wrong=[r"\boxed{0.0000002}"]),
]
SEPARATORS = [
    Graded("1,234", right=["#### 1234", r"\boxed{1{,}234}"], wrong=[r"\boxed{1,235}"]),
    Graded("1234", right=[r"\boxed{1,234}"], wrong=[r"\boxed{1.234}", r"\boxed{1,23}"]),
    Graded("1234.5", right=[r"\boxed{1,234.5}"]),
    Graded("1234567", right=[r"\boxed{1,234,567}", r"\boxed{1\,234\,567}", r"\boxed{1 234 567}"]),
    Graded("357", wrong=[r"\boxed{12\,345}", r"\boxed{12 345}"]),
    Graded("10000", right=["#### 10,000 dollars"], wrong=["#### 1,000 dollars"]),
    Graded(
        "2125",
        right=["the answer is 2,125.", "2,1250 was wrong, so the answer is 2125.0"],
        wrong=["the answer is 2,1250", "so 2,12599999"],
    ),
    Graded("1000", right=["so 1,000.0 in total"], wrong=["in total 1,0000", "in total 1,000,0"]),
]
UNITS = [
    Graded(
        "18", right=["#### $18", "#### 18 dollars", r"\boxed{\$18.00}"], wrong=["#### 17 dollars", "#### -18 dollars"]
    ),
    Graded("5", right=[r"\boxed{5 \text{ apples}}", r"\boxed{5 \mathrm{~cm}}", r"\boxed{5 apples}", "#### 5km"]),
    Graded("5", wrong=[r"\boxed{6\text{ cm}}"]),
    Graded(
        "12",
        right=[r"\boxed{12 dollars}", r"\boxed{12 people}", r"\boxed{12 square feet}", r"\boxed{12 cups}"],
        wrong=[
            r"\boxed{13 dollars}",
            r"\boxed{12 or more}",
            r"\boxed{12 thousands}",
            r"\boxed{12 xy}",
            r"\boxed{x dollars}",
        ],
    ),
    Graded("12 dollars", right=[r"\boxed{12}", r"\boxed{12 dollars}"], wrong=[r"\boxed{13}", r"\boxed{12 cents}"]),
    Graded(r"5 \text{ cm}", right=[r"\boxed{5}"]),
    Graded("25", right=[r"\boxed{25\text{ cm}^2}"]),
    Graded("60", right=[r"\boxed{60 \text{ mph}}", "#### 60 minutes in 1 hour"]),
    Graded("90", right=[r"\boxed{90^\circ}", r"\boxed{90\text{ degrees}}", r"\boxed{90°}"]),
    Graded(r"90^\circ", right=[r"\boxed{90}", r"\boxed{90^{\circ}}"], wrong=[r"\boxed{45}"]),
]
MEASURES = [  # both sides have a unit
    Graded(
        "5 hours",
        right=[r"\boxed{5 hrs}", r"\boxed{5\text{ hours}}", "#### 5 hours", "It takes 5 hours.", "It takes 5."],
        wrong=[r"\boxed{5 \text{ minutes}}", "#### 5 minutes", "It takes 5 minutes."],
    ),
    Graded("7 cm", right=[r"\boxed{7 \mathrm{~cm}}", r"\boxed{7\text{ centimeters}}"], wrong=[r"\boxed{7 km}"]),
    Graded("7 km", wrong=[r"\boxed{7 cm}", "#### 7 cm"]),
    Graded("7 m", right=[r"\boxed{7\text{ m}}"], wrong=[r"\boxed{7 mm}"]),
    Graded("$5", right=[r"\boxed{\$5}", r"\boxed{5\text{ dollars}}"], wrong=[r"\boxed{5 cents}", r"\boxed{5 euros}"]),
    Graded("60 mph", right=[r"\boxed{60\text{ miles per hour}}"], wrong=[r"\boxed{60\text{ kilometers per hour}}"]),
    Graded(
        r"25\text{ cm}^2",
        right=[r"\boxed{25\text{ cm}^2}", r"\boxed{25\text{ square centimeters}}"],
        wrong=[r"\boxed{25\text{ cm}}", r"\boxed{25\text{ cm}^3}"],
    ),
    Graded("20°C", right=[r"\boxed{20°C}"], wrong=[r"\boxed{20°F}"]),
    Graded("6 feet", right=[r"\boxed{6\text{ ft}}"], wrong=[r"\boxed{6\text{ inches}}"]),
]
SPANS = [  # dates, times, telephone numbers, ranges
    Graded("2024-01-05", right=["The date is 2024-01-05."], wrong=[r"\boxed{2018}", r"\boxed{2024-01-06}"]),
    Graded("2018", wrong=[r"\boxed{2024-01-05}"]),
    Graded("3-5", right=[r"\boxed{3--5}", r"\boxed{3 to 5}", "between 3-5"], wrong=[r"\boxed{-2}", r"\boxed{4-6}"]),
    Graded("3-5 days", right=["#### 3–5 days"], wrong=[r"\boxed{2 days}"]),
    Graded("-2", right=[r"\boxed{3-5}"]),
    Graded("10:30", right=["It starts at 10:30."], wrong=[r"\boxed{1/3}", "It starts at 10:45."]),
    Graded("10:30 am", right=[r"\boxed{10:30 AM}"], wrong=[r"\boxed{10:30 pm}"]),
    Graded("1/3", wrong=[r"\boxed{10:30}"]),
    Graded("1:2", right=[r"\boxed{\frac{1}{2}}"]),
    Graded("555-1234", right=[r"\boxed{555-1234}"], wrong=[r"\boxed{-679}"]),
]
STATEMENTS = [  # unmarked answers that are the reference
    Graded("Yes", right=["Yes", "yes.", "Answer: Yes", "The answer is **Yes**."], wrong=["No", "I say yes or no"]),
    Graded("(B)", right=["(B)", "B", "Answer: (B) 42", "The answer is (B)."], wrong=["(A)", "Answer: C", "Not (B)"]),
    Graded(
        "C", right=["Answer: C", "**Answer:** C", "The correct answer is C.", "C. Paris"], wrong=["Answer: A, not C"]
    ),
    Graded("A", wrong=["Answer: A man", "A man"]),
    Graded("Lima", right=["The answer is Lima"], wrong=["it may be Lima", "The answer is not Lima"]),
]
FRACTIONS = [
    Graded(r"\frac{1}{2}", right=[r"\boxed{\frac{2}{4}}", r"\boxed{0.5}"], wrong=[r"\boxed{\frac{1}{3}}"]),
    Graded("3/4", right=[r"\boxed{3/4}", r"\boxed{\dfrac{3}{4}}", r"\boxed{\tfrac34}"], wrong=[r"\boxed{4/3}"]),
    Graded(r"-\frac{1}{2}", right=[r"\boxed{\frac{-1}{2}}"], wrong=[r"\boxed{\frac{1}{2}}"]),
    Graded("18", right=[r"#### \frac{36}{2}"]),
    Graded("3.5", right=[r"\boxed{3\frac{1}{2}}", r"\boxed{3 1/2}"]),
    Graded("2", wrong=[r"\boxed{3 1/2}"]),
    Graded("5", wrong=[r"\boxed{2 3}"]),
    Graded(r"3\frac{1}{2}", right=[r"\boxed{\frac{7}{2}}"]),
    Graded(r"\frac{3}{2}", wrong=[r"\boxed{3\frac{1}{2}}"]),
]
PERCENT = [
    Graded("50", right=[r"\boxed{50\%}", "#### 50%", r"\boxed{50 \text{ percent}}"]),
    Graded("0.5", right=[r"\boxed{50\%}", "#### 50%"]),
    Graded("5", wrong=[r"\boxed{50\%}"]),
    Graded("0.05", wrong=[r"\boxed{50\%}"]),
    Graded(r"50\%", right=[r"\boxed{50}", r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", r"\boxed{50%}"]),
    Graded(r"50\%", wrong=[r"\boxed{0.5\%}", r"\boxed{5}", "#### 0.5%"]),
    Graded("12.5", right=[r"\boxed{12.50\%}"]),
    Graded(r"33\frac{1}{3}\%", right=[r"\boxed{\frac{100}{3}\%}", r"\boxed{\frac{1}{3}}"]),
]
SETS = [  # sets, lists, intervals, tuples
    Graded(r"\{1,2\}", right=[r"\boxed{\{2,1\}}", r"\boxed{1,2}"], wrong=[r"\boxed{\{1,3\}}", r"\boxed{\{1,2,3\}}"]),
    Graded("1,2", right=[r"\boxed{2, 1}", r"\boxed{x=1 \text{ or } x=2}"], wrong=[r"\boxed{12}", r"\boxed{1}"]),
    Graded("12", wrong=[r"\boxed{1,2}"]),
    Graded("5", wrong=[r"\boxed{2 \text{ or } 5}", r"\boxed{2 or 5}", r"\boxed{2, 5}"]),
    Graded("1,-1", right=[r"\boxed{\pm 1}"]),
    Graded(r"\emptyset", right=[r"\boxed{\{\}}"]),
    Graded("[0,1)", right=[r"\boxed{[0, 1)}"], wrong=[r"\boxed{(0,1]}", r"\boxed{[0,1]}", r"\boxed{[0,2)}"]),
    Graded(r"(-\infty,2)\cup(3,\infty)", right=[r"\boxed{(3,\infty)\cup(-\infty,2)}"]),
    Graded(r"x \le 2", right=[r"\boxed{(-\infty, 2]}", r"\boxed{x ≤ 2}"]),
    Graded(r"(-\infty,2]", right=[r"\boxed{(-∞,2]}"]),
    Graded("(1,2)", right=[r"\boxed{(1, 2)}", r"\boxed{\left(1,2\right)}", r"\boxed{1,2}"], wrong=[r"\boxed{(2,1)}"]),
    Graded(r"(\frac{1}{2}, 3, 4)", right=[r"\boxed{(.5, 3, 4)}"], wrong=[r"\boxed{(5, 3, 4)}"]),
]
WORDS = [
    Graded("Paris", right=[r"\boxed{\text{Paris}}", r"\boxed{paris}"], wrong=[r"\boxed{sPiar}", "it may be Paris"]),
    Graded("A", right=[r"\boxed{\text{A}}", r"\boxed{(A)}", r"\boxed{\textbf{(A)}}"], wrong=[r"\boxed{B}"]),
    Graded("yes", right=[r"\boxed{\text{Yes}}", "#### yes"], wrong=[r"\boxed{no}"]),
    Graded("even", wrong=[r"\boxed{\text{neve}}", r"\boxed{odd}"]),
    Graded(r"\text{New York}", right=[r"\boxed{New York}", r"\boxed{\textbf{New York}}", r"\boxed{\mathrm{New York}}"]),
    Graded("ab", right=[r"\boxed{ab}", r"\boxed{ba}"]),
    Graded("no", right=[r"\boxed{No}", r"\boxed{\text{no}}"], wrong=[r"\boxed{yes}", r"\boxed{none}"]),
    Graded("infinity", right=[r"\boxed{\infty}"]),
]
MATRICES = [
    Graded(
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        right=[r"\boxed{\begin{bmatrix} 1 & 2 \\ 3 & \frac{8}{2} \end{bmatrix}}"],
        wrong=[r"\boxed{\begin{pmatrix}1&3\\2&4\end{pmatrix}}"],
    ),
]
MARKS = [  # the last box counts, then the last ####, then what the text ends with
    Graded("2", right=[r"first \boxed{1}, then \boxed{2}.", r"\boxed{\boxed{2}}", "#### 1\n#### 2"]),
    Graded("1", wrong=[r"first \boxed{1}, then \boxed{2}.", "#### 1\n#### 2"]),
    Graded("3", right=[r"#### 1 but \boxed{3}"], wrong=["#### 10\n\nSo 3 people remain."]),
    Graded("10", right=["#### 10\n\nSo 3 people remain."]),
    Graded("42", right=["42", "**42**", "Answer: 42", "Answer: $42$", "#### **42**", r"$\boxed{42}$.", r"\boxed{:42}"]),
    Graded("42", right=[r"#### \boxed{42}", r"\boxed{**42**}", r"\boxed 42", r"\fbox{42}", r"\boxed{answer: 42}"]),
    Graded("42", wrong=["", r"\boxed{}", "I do not know", r"42 at first, but \boxed{41}", r"\boxed{4}2"]),
    Graded("#### 42", right=[r"\boxed{42}"]),
    Graded(r"\boxed{42}", right=["42"]),
]
SIGNS = [  # negative numbers and powers of ten
    Graded("-3", right=[r"\boxed{-3}", r"\boxed{- 3}", r"\boxed{−3}", "#### -3", "The answer is -3"]),
    Graded("-3", wrong=[r"\boxed{3}", "#### 3"]),
    Graded("3", wrong=[r"\boxed{-3}", "The answer is -3"]),
    Graded("-18", right=[r"\boxed{-\$18}"]),
    Graded("1200", right=[r"\boxed{1.2 \times 10^3}", r"\boxed{1.2\cdot10^3}", r"\boxed{1.2e3}"]),
    Graded("1200", wrong=[r"\boxed{1.2\times 10^4}", r"\boxed{1.2e2}"]),
    Graded(r"1.2 \times 10^{-3}", right=[r"\boxed{0.0012}"]),
    Graded("1024", right=[r"\boxed{2^{10}}", "#### 2^10"]),
]
EXPRESSIONS = [
    Graded(
        r"2\sqrt{3}", right=[r"\boxed{\sqrt{12}}", r"\boxed{2 \sqrt 3}", r"\boxed{2√3}"], wrong=[r"\boxed{3\sqrt{2}}"]
    ),
    Graded(r"\frac{1}{\sqrt{2}}", right=[r"\boxed{\frac{\sqrt{2}}{2}}"], wrong=[r"\boxed{0.7}"]),
    Graded(r"2\pi", right=[r"\boxed{2\pi}", r"\boxed{2π}"], wrong=[r"\boxed{6.28}"]),
    Graded("3", wrong=["#### 3x", r"#### 3\pi", "#### 3 + x", r"\boxed{x^2 + 3}"]),
    Graded("x^2+2x+1", right=[r"\boxed{(x+1)^2}"], wrong=[r"\boxed{(x-1)^2}"]),
    Graded(r"\frac{x}{2}", right=[r"\boxed{0.5x}"]),
    Graded("6", right=[r"\boxed{3!}", r"\boxed{\binom{4}{2}}", "#### 2 * 3"]),
    Graded("1+2i", right=[r"\boxed{2i+1}"], wrong=[r"\boxed{1-2i}"]),
]
EQUATIONS = [
    Graded("3", right=[r"\boxed{x=3}", "#### x = 3", r"\boxed{1+2=3}", r"\boxed{x \approx 3}"], wrong=[r"\boxed{x=4}"]),
    Graded("x=3", right=[r"\boxed{3}"], wrong=[r"\boxed{x=4}"]),
    Graded("y=2x+1", right=[r"\boxed{y = 1+2x}", r"\boxed{2x+1}"]),
    Graded("x=1, y=2", right=[r"\boxed{y=2, x=1}"], wrong=[r"\boxed{x=2, y=1}"]),
    Graded("x>3", right=[r"\boxed{3<x}"], wrong=[r"\boxed{x<3}"]),
]

TABLE = [
    *POINTS,
    *SEPARATORS,
    *UNITS,
    *MEASURES,
    *SPANS,
    *STATEMENTS,
    *FRACTIONS,
    *PERCENT,
    *SETS,
    *WORDS,
    *MATRICES,
    *MARKS,
    *SIGNS,
    *EXPRESSIONS,
    *EQUATIONS,
]
ROWS = [
    (graded.reference, text, verdict)
    for graded in TABLE
    for verdict, texts in ((True, graded.right), (False, graded.wrong))
    for text in texts
]

MISGRADED = {  # our verdicts that a careful human grader would not give
    "decimals are compared after rounding to 6 places": [("0.0000001", r"\boxed{0.0000002}")],
    "after `####`, the last number counts": [("60", "#### 60 minutes in 1 hour")],
    "two numbers side by side are added": [("5", r"\boxed{2 3}")],
    r"only `\boxed` marks an answer, and a box holds nothing else": [
        ("42", r"\fbox{42}"),
        ("42", r"\boxed{answer: 42}"),
    ],
}
DIFFERENT = {  # where math-verify's verdict is not ours: ours is the human's
    r"`50\%` in a formula equals 50 and 0.5": [
        ("50", r"\boxed{50\%}"),
        ("0.5", r"\boxed{50\%}"),
        (r"50\%", r"\boxed{0.5}"),
        (r"50\%", r"\boxed{\frac{1}{2}}"),
        (r"50\%", r"\boxed{50%}"),
        ("12.5", r"\boxed{12.50\%}"),
        (r"33\frac{1}{3}\%", r"\boxed{\frac{100}{3}\%}"),
        (r"33\frac{1}{3}\%", r"\boxed{\frac{1}{3}}"),
    ],
    "`12 dollars` is 12": [
        ("12", r"\boxed{12 dollars}"),
        ("12", r"\boxed{12 people}"),
        ("12", r"\boxed{12 cups}"),
        ("12 dollars", r"\boxed{12}"),
    ],
    r"`12\,345` and `12 345` are 12345, not 12 + 345": [
        ("1234567", r"\boxed{1\,234\,567}"),
        ("1234567", r"\boxed{1 234 567}"),
        ("357", r"\boxed{12\,345}"),
        ("357", r"\boxed{12 345}"),
    ],
    "`2,1250` is not 2125": [
        ("2125", "the answer is 2,1250"),
        ("2125", "so 2,12599999"),
        ("1000", "in total 1,0000"),
        ("1000", "in total 1,000,0"),
    ],
    "`3 1/2` is 3.5, not (3 + 1)/2": [("3.5", r"\boxed{3 1/2}"), ("2", r"\boxed{3 1/2}")],
    "`1.2e3` is 1200": [("1200", r"\boxed{1.2e3}")],
    "`°`, `√` and `∞` are read as in LaTeX": [
        ("90", r"\boxed{90°}"),
        (r"2\sqrt{3}", r"\boxed{2√3}"),
        (r"(-\infty,2]", r"\boxed{(-∞,2]}"),
    ],
    r"Punctuation and `**` around an answer, and `\text` around a number, are ignored": [
        ("5", r"\boxed{5.}"),
        ("42", r"\boxed{:42}"),
        ("42", r"\boxed{**42**}"),
        ("0.5", r"\boxed{\text{.5}}"),
    ],
    "Words of three or more letters are compared as words, not as products of variables": [
        ("Paris", r"\boxed{sPiar}"),
        ("yes", "#### yes"),
    ],
    "The last box counts, not the set of all boxes": [("2", r"first \boxed{1}, then \boxed{2}.")],
    "The text after `####` counts, not the last number of the completion": [
        ("3", "#### 10\n\nSo 3 people remain."),
        ("10", "#### 10\n\nSo 3 people remain."),
    ],
    "A number after `####` counts only as the whole answer or before words, not out of a formula": [
        ("3", "#### 3x"),
        ("3", r"#### 3\pi"),
        ("3", "#### 3 + x"),
    ],
    "Different units are different answers": [
        ("$5", r"\boxed{5 cents}"),
        (r"25\text{ cm}^2", r"\boxed{25\text{ cm}^3}"),
        (r"25\text{ cm}^2", r"\boxed{25\text{ cm}}"),
        ("5 hours", "#### 5 minutes"),
        ("5 hours", "It takes 5 minutes."),
        ("5 hours", r"\boxed{5 \text{ minutes}}"),
        ("6 feet", r"\boxed{6\text{ inches}}"),
        ("60 mph", r"\boxed{60\text{ kilometers per hour}}"),
        ("7 cm", r"\boxed{7 km}"),
        ("7 km", "#### 7 cm"),
        ("7 km", r"\boxed{7 cm}"),
        ("7 m", r"\boxed{7 mm}"),
    ],
    "Dates, times and ranges are not arithmetic": [
        ("1/3", r"\boxed{10:30}"),
        ("10:30", "It starts at 10:30."),
        ("10:30", r"\boxed{1/3}"),
        ("10:30 am", r"\boxed{10:30 AM}"),
        ("10:30 am", r"\boxed{10:30 pm}"),
        ("2018", r"\boxed{2024-01-05}"),
        ("2024-01-05", "The date is 2024-01-05."),
        ("2024-01-05", r"\boxed{2018}"),
        ("3-5", r"\boxed{-2}"),
        ("3-5", r"\boxed{3 to 5}"),
        ("3-5", r"\boxed{3--5}"),
        ("3-5", r"\boxed{4-6}"),
        ("3-5 days", "#### 3–5 days"),
        ("555-1234", r"\boxed{-679}"),
    ],
    "An unmarked answer that is the reference counts": [
        ("(B)", "(B)"),
        ("(B)", "Answer: (B) 42"),
        ("(B)", "B"),
        ("(B)", "The answer is (B)."),
        ("C", "**Answer:** C"),
        ("C", "Answer: C"),
        ("C", "C. Paris"),
        ("C", "The correct answer is C."),
        ("Lima", "The answer is Lima"),
        ("Yes", "Answer: Yes"),
        ("Yes", "The answer is **Yes**."),
        ("Yes", "Yes"),
        ("Yes", "yes."),
    ],
}
