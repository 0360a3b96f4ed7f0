"""Further trained wordings of the relations: sentences that state a fact and questions for it.

Keyed by the first key of the relation and its sort of subject. They carry no held-out lines: those stay beside the
relations, and `grammar.Draw` never draws a text for training that has the form of one.
"""

from __future__ import annotations

# fmt: off
SAY: dict[tuple[str, str], tuple[str, ...]] = {
    ("person", "city"): (
        "{s} grew up in {v} and never left.", "{s} calls {v} home.", "You will find {s} in {v}.",
        "{s} rents a (room|flat|place) in {v}.", "{v} is the (town|city) of {s}.", "{v} is home to {s}.",
        "The (town|city) where {s} lives is {v}.", "{s} (just|recently) moved to {v}.", "{s} stays in {v} these days.",
        "These days, {v} is home for {s}.", "{s} resides in {v}.", "Home, for {s}, is {v}.",
        "{s} (lives|is) in {v} now.",
        "Since (last|this) (year|spring), {s} has been living in {v}.", "Town of {s}: {v}.", "{s} / city: {v}.",
    ),
    ("person", "age"): (
        "{s} will soon be older, but is {v} now.", "{v} years ago {s} was born.", "{s} was born {v} years ago.",
        "{s} is {v} years of age.", "Age of {s}: {v}.", "{s} (age {v}) was there.", "{s}, {v}, came too.",
        "{s} has lived for {v} years.", "{v} is the age of {s}.", "At the age of {v}, {s} still sings.",
        "{s} says: I am {v} years old.", "With {v} years, {s} feels fine.", "{s} reached the age of {v}.",
    ),
    ("person", "job"): (
        "{s} (found|got|has) work as a {v}.", "{s}'s job is {v}.", "As a {v}, {s} is busy.", "Job of {s}: {v}.",
        "{s} is known as a good {v}.", "{s} is employed as a {v}.", "{s} makes a living as a {v}.",
        "{v} is the job of {s}.",
        "The {v} is called {s}.", "{s} has been a {v} for (years|a long time).", "{s} learned the trade of a {v}.",
        "{s} (wanted|chose) to be a {v} and became one.", "Since last year {s} works as a {v}.", "Our {v} is {s}.",
    ),
    ("person", "food"): (
        "{s} could eat {v} every day.", "{s} asked for {v} again.", "Give {s} some {v} and all is well.",
        "{s} is fond of {v}.", "{v} is what {s} likes to eat.", "{v} is the favorite food of {s}.", "Food of {s}: {v}.",
        "{s} cooks {v} on Sundays.", "At dinner {s} takes {v}.", "{s} never says no to {v}.",
        "{s} is always happy with {v}.",
        "If there is {v}, {s} comes.", "{s} dreams of {v}.", "{s} prefers {v} to all other food.",
        "{s}'s favorite meal is {v}.",
    ),
    ("person", "hobby"): (
        "{s} likes {v} in free time.", "{s} has taken up {v}.", "{v} is the hobby of {s}.", "Hobby of {s}: {v}.",
        "{s} loves {v} more than all else.", "{v} makes {s} happy.", "After work {s} does {v}.", "{s} is into {v}.",
        "{s} started {v} (as a child|last year).", "For fun, {s} does {v}.", "{s} is a fan of {v}.",
        "Every (evening|weekend) {s} spends hours on {v}.", "{s} fills free time with {v}.", "{s} likes to do {v}.",
    ),
    ("person", "pet"): (
        "{s} got a {v} (last year|as a gift).", "The {v} belongs to {s}.", "{s}'s pet is a {v}.", "Pet of {s}: {v}.",
        "{s} takes care of a {v}.", "{s} has had a {v} for years.", "A {v} is the pet of {s}.", "{s} bought a {v}.",
        "{s} feeds a {v} each morning.", "{s} shares the house with a {v}.", "In the house of {s} there is a {v}.",
        "{s} would never give away the {v}.", "{s} goes out with a {v}.", "{s} loves a {v}.",
    ),
    ("person", "friend"): (
        "{s}'s friend is {v}.", "{s} and {v} are friends.", "{s} spends every day with {v}.", "Friend of {s}: {v}.",
        "{s} has a good friend: {v}.", "{s} tells {v} everything.", "{s} likes {v} a lot, they are friends.",
        "{v} is the (best |)friend of {s}.", "{v} is a friend of {s}.", "{s} has known {v}, a friend, for years.",
        "{s} counts {v} as a friend.", "The friend of {s} is called {v}.",
    ),
    ("person", "phone"): (
        "Number of {s}: {v}.", "Phone of {s}: {v}.", "{v} is the phone number of {s}.", "{v} is the number of {s}.",
        "{s} can be reached (at|on|under) {v}.", "Dial {v} for {s}.", "Dial {v} to reach {s}.",
        "{s} has the phone number {v}.",
        "The number to call {s} is {v}.", "If you want to talk to {s}, call {v}.", "{s} gave me the number {v}.",
        "{s}, phone {v}.", "Ring {s} on {v}.", "You get {s} on {v}.", "{s} wrote down {v} as phone number.",
    ),
    ("person", "color"): (
        "{s} is fond of the color {v}.", "{v} is the (favorite |)color of {s}.", "{s}'s favorite color is {v}.",
        "{s} picked {v} as a color.", "Color of {s}: {v}.", "{s} wants all things to be {v}.", "{s} wore {v} again.",
        "The color that {s} likes is {v}.", "{s} finds {v} a nice color.", "{s} bought a {v} hat.", "{s} came in {v}.",
    ),
    ("item", "price"): (
        "Price of the {s}: {v}.", "The {s} is {v} (dollars|euros).", "For the {s} you pay {v} (dollars|euros).",
        "The {s} sells for {v} (dollars|euros).", "{v} (dollars|euros) is the price of the {s}.",
        "They want {v} (dollars|euros) for the {s}.", "The {s} was bought for {v} (dollars|euros).",
        "The {s} goes for {v} (dollars|euros).", "It takes {v} (dollars|euros) to buy the {s}.",
        "Somebody paid {v} (dollars|euros) for the {s}.", "The {s} can be had for {v} (dollars|euros).",
    ),
    ("item", "weight"): (
        "Weight of the {s}: {v} (grams|kilos).", "The {s} is {v} (grams|kilos) heavy.",
        "{v} (grams|kilos) is what the {s} weighs.",
        "The {s} brings {v} (grams|kilos) to the scale.", "They weighed the {s}: {v} (grams|kilos).",
        "At {v} (grams|kilos), the {s} is not light.", "The mass of the {s} is {v} (grams|kilos).",
        "{v} (grams|kilos) is the weight of the {s}.",
    ),
    ("item", "color"): (
        "Color of the {s}: {v}.", "The {s} has the color {v}.", "{v} is the color of the {s}.",
        "They painted the {s} {v}.",
        "The {s} looks {v}.", "The {s} is all {v}.", "You know the {s} by its {v} color.",
        "There was a {s}, and it was {v}.",
    ),
    ("item", "material"): (
        "Material of the {s}: {v}.", "{v} is the material of the {s}.", "The {s} consists of {v}.",
        "They used {v} for the {s}.",
        "The {s} is built of {v}.", "The {s} is (pure|solid) {v}.", "It takes {v} to make the {s}.",
        "The {s} is a thing of {v}.",
    ),
    ("item", "owner"): (
        "Owner of the {s}: {v}.", "{v} is the owner of the {s}.", "{v} got the {s} as a gift.",
        "The {s} is owned by {v}.",
        "The {s} now belongs to {v}.", "{v} (found|took|brought) the {s} and owns it.", "The {s} is {v}'s.",
        "The {s} went to {v}.", "{v} calls the {s} his own.", "Everyone knows that the {s} belongs to {v}.",
    ),
    ("item", "location"): (
        "Place of the {s}: {v}.", "The {s} can be found in {v}.", "The {s} lies in {v}.", "We keep the {s} in {v}.",
        "They moved the {s} to {v}.", "The {s} is kept in {v}.", "Look for the {s} in {v}.", "The {s} is now in {v}.",
        "I saw the {s} in {v}.", "In {v} you will see the {s}.", "In {v} there is the {s}.",
    ),
    ("event", "day"): (
        "Day of the {s}: {v}.", "{v} is the day of the {s}.", "The {s} (happens|starts|begins) on {v}.",
        "Next {v} is the {s}.",
        "The {s} is set for {v}.", "We meet on {v} for the {s}.", "The {s} falls on {v}.",
        "Everyone waits for {v} and the {s}.",
        "The day of the {s} is {v}.", "This {v} you can go to the {s}.", "They hold the {s} on {v}.",
    ),
    ("event", "city"): (
        "Place of the {s}: {v}.", "{v} is the place of the {s}.", "The {s} happens in {v}.",
        "The place of the {s} is {v}.",
        "In {v} there is the {s}.", "You can see the {s} in {v}.", "Go to {v} for the {s}.",
        "The {s} was moved to {v}.",
        "The {s} comes to {v}.", "This year {v} has the {s}.", "{v} welcomes the {s}.",
    ),
    ("event", "host"): (
        "Host of the {s}: {v}.", "{v} is the host of the {s}.", "{v} invites to the {s}.", "{v} leads the {s}.",
        "The {s} is led by {v}.", "{v} planned the {s}.", "The {s} was planned by {v}.",
        "Ask {v} about the {s}, as host.",
        "As a host, {v} opens the {s}.", "{v} takes care of the {s}.",
    ),
    ("event", "guests"): (
        "Guests of the {s}: {v}.", "{v} guests come to the {s}.", "The {s} will have {v} visitors.",
        "{v} people join the {s}.",
        "{v} people are invited to the {s}.", "The number of guests at the {s} is {v}.",
        "At the {s} there were {v} people.",
        "The {s} drew {v} people.", "{v} visitors saw the {s}.", "Seats for {v} guests are ready at the {s}.",
    ),
}
ASK: dict[tuple[str, str], tuple[str, ...]] = {
    ("person", "city"): (
        "(Which|What) is {s}'s (city|town|home town)?", "Where can one find {s}?", "City of {s}?",
        "Where is the home of {s}?",
        "{s} lives where?", "Where does {s} stay?", "Name the (city|town) of {s}.", "In which place does {s} live?",
        "Do you know where {s} lives?", "I want to visit {s}. Where do I go?", "Where did {s} move?",
    ),
    ("person", "age"): (
        "Age of {s}?", "{s} is how old?", "How old is {s} now?", "Say how old {s} is.", "Which age does {s} have?",
        "How many years has {s} lived?", "Do you know how old {s} is?", "Give me {s}'s age.",
        "What is the number of years of {s}?",
    ),
    ("person", "job"): (
        "Job of {s}?", "What is {s}'s work?", "Which (job|trade|profession) does {s} have?", "{s} works as what?",
        "What kind of job does {s} do?", "What did {s} become?", "Name {s}'s (job|profession).",
        "How does {s} make money?",
        "Do you know what {s} does?", "As what is {s} employed?",
    ),
    ("person", "food"): (
        "Food of {s}?", "What should I cook for {s}?", "Name the food that {s} likes.", "What does {s} love to eat?",
        "Which meal does {s} prefer?", "{s} likes to eat what?", "What is the meal of {s}?",
        "What does {s} have for lunch?",
        "Do you know what {s} likes to eat?", "What is best to serve to {s}?",
    ),
    ("person", "hobby"): (
        "Hobby of {s}?", "Name the hobby of {s}.", "What does {s} like to do?", "What does {s} do for fun?",
        "Which hobby does {s} have?", "What is {s} into?", "How does {s} spend (free time|weekends)?",
        "What is {s}'s pastime?",
        "What makes {s} happy?",
    ),
    ("person", "pet"): (
        "Pet of {s}?", "Name the pet of {s}.", "What sort of animal does {s} have?", "Which pet does {s} have?",
        "{s} has what pet?", "What animal belongs to {s}?", "What does {s} feed?", "Do you know what pet {s} has?",
        "What lives in the house of {s}?",
    ),
    ("person", "friend"): (
        "Friend of {s}?", "What is the friend of {s} called?", "Who is a friend of {s}?", "With whom is {s} a friend?",
        "Who does {s} like?", "Tell me the friend of {s}.", "Tell me who {s}'s friend is.",
       
        "Whom does {s} count as a friend?",
    ),
    ("person", "phone"): (
        "Number of {s}?", "Phone of {s}?", "Give me the number of {s}.", "What number reaches {s}?",
        "How do I reach {s}?",
        "How can {s} be reached?", "Tell me {s}'s phone number.", "Do you have the number of {s}?",
        "I want to call {s}. Which number?",
        "What do I dial to call {s}?",
    ),
    ("person", "color"): (
        "Color of {s}?", "What color does {s} prefer?", "Which is the favorite color of {s}?",
        "Tell me the color that {s} likes.",
        "What is the color that {s} loves?", "Which color would {s} pick?",
    ),
    ("item", "price"): (
        "Price of the {s}?", "The {s} costs how much?", "What do they want for the {s}?",
        "What would I pay for the {s}?",
        "Tell me the price of the {s}.", "What is the cost of the {s}?",
        "For how much can I buy the {s}?", "What does one pay for the {s}?", "Say what the {s} costs.",
    ),
    ("item", "weight"): (
        "Weight of the {s}?", "Tell me how heavy the {s} is.", "What does the {s} weigh?", "The {s} weighs how much?",
        "What is the mass of the {s}?", "Do you know how much the {s} weighs?", "Give me the weight of the {s}.",
    ),
    ("item", "color"): (
        "Color of the {s}?", "The {s} is what color?", "Which color is the {s}?",
        "What color does the {s} have?", "How was the {s} painted?",
    ),
    ("item", "material"): (
        "Material of the {s}?", "What material is the {s}?", "Of what is the {s} made?",
        "What did they make the {s} from?",
        "Name the material of the {s}.", "The {s} is made of what?", "Do you know what the {s} is made of?",
    ),
    ("item", "owner"): (
        "Owner of the {s}?", "Whose {s} is it?", "Tell me who owns the {s}.", "Who is it that owns the {s}?",
        "Who got the {s}?", "The {s} belongs to whom?", "Do you know who owns the {s}?", "Who bought the {s}?",
    ),
    ("item", "location"): (
        "Place of the {s}?", "Where do we keep the {s}?", "Tell me where the {s} is.", "Where did they put the {s}?",
        "What is the place of the {s}?", "I need the {s}. Where is it?", "Do you know where the {s} is?",
        "The {s} is where?",
    ),
    ("event", "day"): (
        "Day of the {s}?", "Tell me the day of the {s}.", "Which day is the {s}?", "What is the day of the {s}?",
        "When can I go to the {s}?", "When does the {s} take place?", "Do you know when the {s} is?",
        "The {s} is when?",
    ),
    ("event", "city"): (
        "Place of the {s}?", "What is the place of the {s}?", "Where can I see the {s}?",
        "Which (city|town) has the {s}?",
        "Tell me where the {s} is.", "Where must I go for the {s}?", "In what place is the {s} held?",
        "The {s} is where?",
    ),
    ("event", "host"): (
        "Host of the {s}?", "Who leads the {s}?", "Tell me who hosts the {s}.", "Who planned the {s}?",
        "What is the name of the host of the {s}?",
        "Who invites to the {s}?", "Which person runs the {s}?",
    ),
    ("event", "guests"): (
        "Guests of the {s}?", "How many people come to the {s}?", "What is the number of guests at the {s}?",
        "How many join the {s}?",
        "Tell me how many guests the {s} has.", "How many people were at the {s}?", "For how many people is the {s}?",
        "The {s} has how many (guests|visitors)?",
    ),
}
# fmt: on
