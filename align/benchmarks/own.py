"""Prompts written for this project: `decode` measures with them, and text for training keeps off them. They need no network and no
licence."""

from __future__ import annotations

_HARBOUR = (
    "The harbour of Lindholm was dug in 1871, when the old river mouth had silted up. For forty years it lived on timber. After "
    "the sawmills closed in 1913 the town built a cannery, and herring took the place of planks. The cannery burned down in 1958 "
    "and was not rebuilt, because the shoals had moved north. Today the quays belong to sailing boats, and a museum in the "
    "former customs house shows how planks were sorted by hand. The council plans to dredge the basin again by 2030."
)
_SWIFTS = (
    "Swifts spend almost their whole lives in the air. They eat, drink and sleep on the wing, and land only to breed. A young "
    "swift that leaves the nest may not touch the ground for two or three years. Because their legs are short, they have trouble "
    "taking off from flat ground, so they nest in high holes of cliffs and old buildings. When roofs are repaired these holes "
    "are closed. Nest boxes help, if they hang at least five metres above the ground and have nothing in front of them."
)
_LIBRARY = (
    "Since March the town library lends tools as well as books. Drills, ladders and a sewing machine can be taken home for a "
    "week. The idea came from two readers who had each bought a drill for a single shelf. In the first half year 412 loans were "
    "counted, most of them on Fridays, and three tools came back broken. A volunteer repairs them in the cellar. The library "
    "wants to add camping gear next summer, but has no room for tents yet."
)
_TIDES = (
    "A tidal power station uses the difference between high and low water. At high tide a basin fills through open gates. The "
    "gates close, the sea falls, and the water in the basin flows back through turbines. Output is small around the turn of the "
    "tide, but it can be predicted years ahead, which wind and sun cannot offer. Such stations are expensive to build, and mud "
    "that settles in the basin has to be removed. Few coasts have a range of more than five metres, which is what pays."
)
_BREAD = (
    "Sourdough rises without added yeast. Flour and water are left to stand for some days, until wild yeasts and lactic acid "
    "bacteria have settled in the mixture. A part of it is kept and fed with fresh flour, and the rest goes into the dough. The "
    "acid keeps mould away and makes the crumb firm. A cold dough ferments slowly and tastes sour; a warm one is milder and is "
    "ready sooner. Bread made with rye needs the acid, because rye flour alone does not hold the gas."
)

BUILTIN: dict[str, tuple[str, ...]] = {
    "chat": (
        "My sister starts a small bakery next month. Write her a warm, short letter with three pieces of "
        "practical advice.",
        "Describe a rainy afternoon in a harbour town, from the point of view of an old ferry captain.",
        "I have a free Saturday, 30 euros and a bicycle. Plan the day for me, hour by hour.",
        "Explain to a ten-year-old why the sea is salty but rivers are not.",
        "Write a polite e-mail to my landlord: the heating has failed twice this week and I work from home.",
        "Give me a simple recipe for lentil soup for four people, with the quantities in a list.",
        "What should a beginner know before keeping bees? Answer in six short paragraphs.",
        "Write the opening scene of a detective story that takes place in a botanical garden at night.",
        "Compare train and plane for a journey of 600 kilometres: time, comfort, price and the environment.",
        "Give a two-minute speech that thanks volunteers who cleaned a river bank for a whole summer.",
    ),
    "reasoning": (
        "Four friends sit in a row. Ana is not at an end, Ben is right of Carla, and Dora sits next to "
        "Ana. Which orders are possible? Explain step by step.",
        "A shop sells a lamp at a discount on Monday and raises the price again on Tuesday by the same "
        "percentage. Is the final price higher, lower or the same? Explain why.",
        "All the tools in the red box are sharp. Some sharp things are made of glass. Does it follow that "
        "some tools in the red box are made of glass? Justify your answer.",
        "A rope bridge carries two people at a time and there is one torch. The walkers need 1, 2, 6 and "
        "9 minutes. Find a quick way to bring everyone across and count the minutes.",
        "A plant closes its leaves every evening even in a dark cupboard. What does this suggest about "
        "what controls the movement? Name an experiment that would test your idea.",
        "A town saw fewer accidents in the year after it put up new signs. List four other explanations "
        "for the drop and say how each could be checked.",
        "Two clocks show the same time at noon. One loses three minutes an hour, the other gains two. "
        "When do they next show the same time on a twelve-hour dial? Reason step by step.",
        "An ice cube floats in a glass of water filled to the brim. What happens to the water level when "
        "it melts? And what if the cube held a small steel ball? Explain.",
        "A friend says: whenever I carry an umbrella it stays dry, so umbrellas prevent rain. Describe "
        "the mistake, and give two other examples of the same mistake.",
        "Three boxes hold apples, pears and a mixture, and every label is wrong. You may take out one "
        "piece of fruit. From which box do you take it, and how do you then know all three?",
    ),
    "coding": (
        "Write a Python function that takes a list of intervals as pairs of numbers and merges those that "
        "overlap. Add a docstring and three examples.",
        "Write a Python class for a bank account with deposit, withdraw and a list of transactions. "
        "Refuse negative amounts with a clear error.",
        "Show me a Python script that reads a CSV file of temperatures, one row a day, and prints the "
        "mean of every month.",
        "Write a function in JavaScript that waits until a user has stopped typing for 300 milliseconds "
        "before it calls another function. Explain each line.",
        "Write an SQL query that finds, for every customer, the date of the first order and the total "
        "spent in the last year. State the tables that you assume.",
        "Implement a queue with two stacks in Python, and say what each operation costs on average.",
        "Write unit tests with pytest for a function `slug(title)` that turns a title into a web address "
        "part.",
        "Explain the difference between a list, a tuple and a set in Python, with a short example of when "
        "to use each.",
        "Write a C function that reverses a string in place, and explain how it deals with an empty string.",
        "This loop is slow: `result = ''` and then `for line in lines: result += line + ';'`. Explain "
        "why, and write a faster version in Python.",
    ),
    "math": (
        "A garden is 12 metres long and 7 metres wide. A path one metre wide runs all around it outside. "
        "What is the area of the path? Show each step.",
        "A printer makes 18 pages a minute and a faster one makes 27. Together, how long do they need for "
        "900 pages?",
        "Solve 3(x − 4) + 5 = 2x + 9 for x and check the answer.",
        "A bag holds 5 red, 4 blue and 3 green marbles. Two are drawn without putting them back. What is "
        "the probability that they have the same colour?",
        "The sum of three consecutive odd numbers is 147. Find the numbers and explain the method.",
        "A car travels 150 kilometres at 60 kilometres an hour and comes back at 100. What is its average "
        "speed for the whole way? Explain why it is not 80.",
        "Prove that the product of any two consecutive whole numbers is even.",
        "Find the derivative of f(x) = x³ − 6x² + 9x + 2 and say where the function rises and where it "
        "falls.",
        "Lena saves 40 euros in the first month and 5 euros more in every month after that. How much has "
        "she saved after a year? Derive a formula.",
        "A ladder 6.5 metres long leans on a wall, its foot 2.5 metres away. How high does it reach? How "
        "far does the top slip down when the foot is pulled out by 1.4 metres?",
    ),
}
"""Forty, ten each of chat, reasoning, coding and maths."""

TASKS: dict[str, tuple[str, ...]] = {
    "translation": (
        "Translate from German to English: Der Zug nach Hamburg fällt heute wegen eines Sturms aus. Fahrgäste können ihre Karten "
        "bis Ende der Woche benutzen.",
        "Translate from French to English: Nous avons loué une petite maison au bord du lac. Le matin, le brouillard couvre "
        "l'eau, et on n'entend que les oiseaux.",
        "Translate from Spanish to English: La panadería abre a las seis. Si llega temprano, todavía encontrará pan caliente y "
        "una silla junto a la ventana.",
        "Translate into French: The museum is closed on Mondays. Guided tours begin at ten o'clock and last about an hour.",
        "Translate into German: Please leave your wet shoes at the door. The kitchen is on the left, and the soup is still warm.",
    ),
    "summary": tuple(
        f"Summarise this text in two sentences.\n\n{passage}"
        for passage in (_HARBOUR, _SWIFTS, _LIBRARY, _TIDES, _BREAD)
    ),
    "questions": (
        "Why do leaves change their colour in autumn?",
        "What is the difference between a comet and an asteroid?",
        "How does a vaccine protect the body?",
        "Who wrote Frankenstein, and what is the book about?",
        "Why is the sky dark at night although there are so many stars?",
    ),
    "retrieval": tuple(
        f"Answer the question from the passages.\n\n[1] {first}\n\n[2] {second}\n\nQuestion: {question}"
        for first, second, question in (
            (_HARBOUR, _LIBRARY, "Why was the cannery of Lindholm not built again?"),
            (
                _SWIFTS,
                _BREAD,
                "How high should a nest box for swifts hang, and why do swifts need such boxes?",
            ),
            (_LIBRARY, _TIDES, "What does the library lend besides books, and since when?"),
            (_TIDES, _HARBOUR, "What can tidal power offer that wind and sun cannot?"),
            (_BREAD, _SWIFTS, "Why does bread made with rye need acid?"),
        )
    ),
}
"""Twenty, five of each kind."""
