"""The data of training: text, labelled text, parallel text, images, and expressions that are made up.

Every dataset is a pure function of its configuration and the step: a resumed run reads what an undisturbed one would.
"""
