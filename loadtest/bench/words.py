"""English words for prompts of text: short and common, so that most are one token in most vocabularies."""

_TEXT = """
able about above across act add after again age ago agree air all allow alone along already also always among amount
and animal another answer any appear apple area arm around arrive art ask away baby back bad bag ball band bank base
bear beat beauty become bed before begin behind believe below best better between big bird bit black blood blow blue
board boat body bone book born both bottom box boy branch bread break bridge bright bring broad brother brown build
burn business busy buy call camp can capital captain car card care carry case cat catch cause cell center century
certain chair chance change character charge chart check chief child choose church circle city class clean clear
climb clock close cloth cloud coast coat cold collect color column come common company compare complete condition
connect consider contain continue control cook cool copy corn corner correct cost cotton could count country course
cover create crop cross crowd cry current cut dance danger dark day dead deal dear death decide deep degree depend
describe desert design develop die differ direct discuss distant divide doctor dog dollar door double down draw
dream dress drink drive drop dry during each early earth ease east eat edge effect egg eight either electric element
else end enemy energy engine enough enter equal even evening event ever every exact example except excite exercise
expect experience experiment eye face fact fair fall family famous far farm fast fat father favor fear feed feel few
field fight figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly follow
food foot force forest form forward four fraction free fresh friend front fruit full fun game garden gas gather
general gentle get girl give glad glass gold gone good govern grand grass gray great green ground group grow guess
guide half hand happen happy hard hat head hear heart heat heavy help high hill history hit hold hole home hope
horse hot hour house huge human hundred hunt hurry ice idea imagine inch include indicate industry insect instant
interest iron island job join joy jump just keep key kill kind king knew know lady lake land language large last late
laugh law lay lead learn least leave left leg length less let letter level lie life lift light like line liquid list
listen little live locate log long look lost lot loud love low machine main major make man many map mark market
master match material matter mean measure meat meet melody men metal method middle might mile milk million mind mine
minute miss mix modern molecule moment money month moon more morning most mother motion mountain mouth move much
multiply music must name nation natural nature near necessary neck need neighbor never new next night nine noise
noon north nose note nothing notice number object observe occur ocean offer office often oil old once one only open
operate opposite order organ original other our over own page paint pair paper paragraph parent part party pass past
path pattern pay people perhaps period person phrase picture piece pitch place plain plan plane planet plant play
please plural poem point poor populate port pose position possible post pound power practice prepare present press
pretty print probable problem process produce product proper property protect prove provide pull push put quart
question quick quiet quite race radio rail rain raise range rather reach read ready real reason receive record red
region remember repeat reply represent require rest result rich ride right ring rise river road rock roll room root
rope rose round row rule run safe sail salt same sand save say scale school science score sea search season seat
second section see seed seem select self sell send sense sentence separate serve set settle seven several shall
shape share sharp sheet shell shine ship shoe shop shore short should shoulder shout show side sight sign silent
silver similar simple since sing single sister sit six size skill skin sky sleep slip slow small smell smile snow
soft soil soldier solution solve some son song soon sound south space speak special speech speed spell spend spoke
spot spread spring square stand star start state station stay steam steel step stick still stone stop store story
straight strange stream street stretch string strong student study subject substance subtract success such sudden
suffix sugar suggest suit summer sun supply support sure surface surprise swim symbol system table tail take talk
tall teach team teeth tell temperature ten term test thank thick thin thing think third thought thousand three
through throw time tiny together tone tool top total touch toward town track trade train travel tree triangle trip
trouble truck true try tube turn twenty two type under unit until usual valley value vary very view village visit
voice vowel wait walk wall want war warm wash watch water wave way wear weather week weight well west wheel white
whole wide wife wild will win wind window wing winter wire wish woman wonder wood word work world write wrong yard
year yellow yes young
"""
WORDS = tuple(_TEXT.split())
