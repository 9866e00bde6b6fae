"""Questions that a reader might ask of two novels, and a pattern that the passages with an answer match."""

__all__ = ["QUESTIONS"]

QUESTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "jane_eyre": (
        ("a child is locked up in the red room as a punishment", r"red-room"),
        ("Helen Burns dies in her friend's arms", r"helen.{0,400}(dead|died|dying)|fifteen years after her death"),
        (
            "the schoolmaster orders that the girls' curled hair be cut off",
            r"hair must be cut|top-knots|cut off entirely",
        ),
        ("a fire is put out in the master's bed at night", r"curtains were on fire|tongues of flame"),
        (
            "a fortune teller comes to the house and wants to see the young ladies",
            r"gipsy|old crone|sibyl|mother bunches",
        ),
        (
            "a stranger stops the marriage in the church",
            r"existence of an impediment|declare the existence|insuperable impediment",
        ),
        ("the insane wife who is hidden on the third floor", r"mad.{0,60}wife|bertha mason|lunatic"),
        ("lightning splits the great chestnut tree", r"chestnut.{0,120}(struck|lightning|split|riven|cloven)"),
        ("she inherits twenty thousand pounds from an uncle in Madeira", r"twenty thousand pounds"),
        (
            "a clergyman asks her to marry him and come to India as a missionary",
            r"go with me to india|missionary.s wife",
        ),
        ("he lost his sight when the hall burnt down", r"stone-blind|blind ruin|blind man|blindness"),
        ("Reader, the wedding at the end", r"reader,? ?, i married him"),
        ("the horse slips on the ice and the rider sprains his ankle", r"sheet of ice|sprain"),
        ("porridge that is burnt and cannot be eaten", r"burnt porridge|porridge.{0,40}burnt|burned porridge"),
        (
            "she begs for food at a farm and gets bread or cold porridge meant for the pig",
            r"t. pig doesn.t want it|porridge into a pig|mess of cold porridge",
        ),
        ("the wedding veil is torn in two at night", r"veil.{0,200}(rent|torn)|rent it in two"),
        ("the dying aunt confesses that she kept a letter back", r"mrs\. reed.{0,500}letter|letter.{0,300}john eyre"),
        ("a visitor is bitten and bleeds in the night", r"she bit me|sucked the blood"),
        ("voice heard calling her name three times across the moors", r"jane ?! ?jane ?! ?jane"),
        ("the little French girl who likes dresses and presents", r"ad[eè]le.{0,300}(frock|dress|cadeau|present)"),
    ),
    "moby_dick": (
        ("sharing a bed at the inn with a tattooed harpooneer", r"harpooneer.{0,400}bed|tomahawk.{0,300}bed"),
        ("the sermon about Jonah and the whale", r"jonah.{0,200}tarshish"),
        ("a gold coin is nailed to the mast for whoever sees the white whale", r"doubloon|spanish ounce"),
        ("the cabin boy goes mad after being left alone in the sea", r"pip.{0,500}(castaway|idiot|ringed horizon|mad)"),
        ("a coffin is made for the sick savage, who then gets well", r"coffin"),
        ("squeezing lumps of sperm with the hands", r"squeeze! squeeze|squeezing"),
        ("the captain's leg of whale bone", r"ivory leg|bone leg|whalebone leg|leg.{0,60}sperm whale.s jaw"),
        ("prophecy of two hearses and hemp that can only kill him", r"hemp only|two hearses"),
        ("the whiteness of the whale that frightens more than red blood", r"whiteness"),
        ("the other captain lost an arm to the same whale", r"samuel enderby|ivory arm|bunger"),
        (
            "a ship's captain looks for his lost son and begs for help",
            r"rachel.{0,400}(son|boy|child)|my boy, my own boy",
        ),
        ("the chowder of clam and cod at the inn", r"chowder"),
        ("what the ship owners pay: the seven hundred and seventy seventh lay", r"seventy-seventh lay"),
        ("lightning sets the masts aflame with corpusants", r"corpusants|corposants"),
        ("a giant squid rises from the sea", r"squid"),
        ("the ragged prophet who warns them of the ship on the quay", r"elijah"),
        ("the compass needle is turned and the captain makes a new one", r"needle.{0,300}(compass|magnet|loadstone)"),
        ("sharks eat the dead whale at night and the cook preaches to them", r"fleece|fellow-critters"),
        ("the harpooneer falls into the whale's head and is cut free", r"tashtego.{0,400}(head|well|bucket)"),
        (
            "only one is saved, floating on the coffin",
            r"life-buoy.{0,300}coffin|coffin life-buoy|coffin.{0,200}(floated|buoyed)",
        ),
    ),
}
