//! Which prefixes are kept: a tree of pages, and finished sequences for their next turn. In: tokens; out: what of them is in
//! the cache, and who is to go when memory is short: what was used longest ago, leaves first.
//! Tokens are compared, not only hashed: equal hashes of other texts share nothing.
//! NOT here: the pages themselves (kvant-kv), whether memory is short (engine.rs).

use kvant_kv::{PageId, SeqId};
use std::collections::{BTreeMap, HashMap};

/// A page in the tree. Not reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u64);

/// The path from the first page of a text to a later one.
pub type Chain = Vec<NodeId>;

struct Node {
    page: PageId,
    parent: Option<NodeId>,
    tokens: Box<[u32]>,
    children: usize,
    /// Requests that use it now.
    users: usize,
    /// Kept sessions that do.
    sessions: usize,
    used: u64,
}

/// A finished sequence, kept whole.
pub struct Session {
    /// Its place in the cache.
    pub id: SeqId,
    /// The tokens it holds.
    pub tokens: Vec<u32>,
    /// Pages that it shares.
    pub chain: Chain,
    used: u64,
}

/// What is to go next.
pub enum Victim {
    /// A session.
    Session(Session),
    /// A page that nobody uses.
    Page(PageId),
}

/// Prefixes that are kept.
#[derive(Default)]
pub struct Prefixes {
    nodes: BTreeMap<NodeId, Node>,
    children: HashMap<(Option<NodeId>, Box<[u32]>), NodeId>,
    sessions: Vec<Session>,
    next: u64,
    clock: u64,
}

impl Prefixes {
    /// The longest chain of pages of `page_len` tokens that this text begins with.
    pub fn matching(&self, tokens: &[u32], page_len: usize) -> Chain {
        let mut chain = Chain::new();
        for page in tokens.chunks_exact(page_len) {
            match self.child(chain.last().copied(), page) {
                Some(node) => chain.push(node),
                None => break,
            }
        }
        chain
    }

    /// The page of these tokens behind `parent`, if it is kept.
    pub fn child(&self, parent: Option<NodeId>, tokens: &[u32]) -> Option<NodeId> {
        self.children.get(&(parent, tokens.into())).copied()
    }

    /// The pages of a chain.
    pub fn pages(&self, chain: &[NodeId]) -> Vec<PageId> {
        chain.iter().filter_map(|node| self.nodes.get(node)).map(|node| node.page).collect()
    }

    /// Keeps a page behind the last one of `chain`, which is not kept yet.
    pub fn keep(&mut self, chain: &[NodeId], tokens: &[u32], page: PageId) -> NodeId {
        let (id, parent) = (NodeId(self.next), chain.last().copied());
        self.next += 1;
        if let Some(parent) = parent {
            self.nodes.get_mut(&parent).expect("a chain of kept pages").children += 1;
        }
        let used = self.tick();
        self.nodes.insert(id, Node { page, parent, tokens: tokens.into(), children: 0, users: 0, sessions: 0, used });
        self.children.insert((parent, tokens.into()), id);
        id
    }

    /// A request uses these pages from now on.
    pub fn take(&mut self, chain: &[NodeId]) {
        let used = self.tick();
        for id in chain {
            let node = self.nodes.get_mut(id).expect("a chain of kept pages");
            node.users += 1;
            node.used = used;
        }
    }

    /// A request does not use them any more.
    pub fn give_back(&mut self, chain: &[NodeId]) {
        let used = self.tick();
        // A page that was given up as a last resort is not there any more.
        for id in chain {
            if let Some(node) = self.nodes.get_mut(id) {
                node.users -= 1;
                node.used = used;
            }
        }
    }

    /// Requests that use a page.
    pub fn users(&self, node: NodeId) -> usize {
        self.nodes.get(&node).map_or(0, |node| node.users)
    }

    /// Whether all pages of a chain are kept.
    pub fn has(&self, chain: &[NodeId]) -> bool {
        chain.iter().all(|id| self.nodes.contains_key(id))
    }

    /// Keeps a finished sequence.
    pub fn keep_session(&mut self, id: SeqId, tokens: Vec<u32>, chain: Chain) {
        let used = self.tick();
        chain.iter().for_each(|id| self.nodes.get_mut(id).expect("used pages are kept").sessions += 1);
        self.sessions.push(Session { id, tokens, chain, used });
    }

    /// Sessions, and how many first tokens of `tokens` each holds.
    pub fn sessions_matching<'a>(&'a self, tokens: &'a [u32]) -> impl Iterator<Item = (usize, &'a Session, usize)> {
        let common = move |s: &Session| s.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.sessions.iter().enumerate().map(move |(i, s)| (i, s, common(s)))
    }

    /// Takes a session out of those kept.
    pub fn take_session(&mut self, index: usize) -> Session {
        let session = self.sessions.remove(index);
        for id in &session.chain {
            self.nodes.get_mut(id).expect("used pages are kept").sessions -= 1;
        }
        session
    }

    /// What was used longest ago of all that no request uses: sessions, and pages that nothing is behind.
    pub fn victim(&mut self) -> Option<Victim> {
        let session = self.sessions.iter().enumerate().min_by_key(|(_, s)| s.used).map(|(i, s)| (s.used, i));
        let unused = self.nodes.iter().filter(|(_, n)| n.users == 0 && n.sessions == 0 && n.children == 0);
        let page = unused.min_by_key(|(id, n)| (n.used, **id)).map(|(id, n)| (n.used, *id));
        match (session, page) {
            (Some((s, index)), page) if page.is_none_or(|(p, _)| s < p) => {
                Some(Victim::Session(self.take_session(index)))
            }
            (_, Some((_, id))) => Some(Victim::Page(self.drop_leaf(id))),
            _ => None,
        }
    }

    /// When nothing else is left: a page that requests use. Their own blocks stay theirs; what goes is what only the page
    /// owns, such as records out of sight in layers with a window, and the page's place in the tree.
    pub fn last_resort(&mut self) -> Option<PageId> {
        let leaves = self.nodes.iter().filter(|(_, n)| n.sessions == 0 && n.children == 0);
        let id = leaves.min_by_key(|(id, n)| (n.used, **id)).map(|(id, _)| *id)?;
        Some(self.drop_leaf(id))
    }

    fn drop_leaf(&mut self, id: NodeId) -> PageId {
        let node = self.nodes.remove(&id).expect("a page that is kept");
        self.children.remove(&(node.parent, node.tokens));
        if let Some(parent) = node.parent {
            self.nodes.get_mut(&parent).expect("parents outlive their children").children -= 1;
        }
        node.page
    }

    /// Pages that no request uses (`used` false; sessions' included: with the sessions gone, all of them can go) or that
    /// requests use.
    pub fn pages_by_use(&self, used: bool) -> impl Iterator<Item = PageId> {
        self.nodes.values().filter(move |n| (n.users > 0) == used).map(|n| n.page)
    }

    /// Sessions kept.
    pub fn sessions(&self) -> &[Session] {
        &self.sessions
    }

    /// Pages kept.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_kv::{Arm, Cache, LayerConfig, LayerShape, Rows};

    /// Pages and sequences of a real cache: their handles cannot be made up.
    fn cache(pages: usize) -> (Cache, Vec<PageId>, Vec<SeqId>) {
        let shape = LayerShape::new(1, 1, 64).unwrap();
        let layer = LayerConfig { shape, scheme: "k4v4g32p32".parse().unwrap(), visible: None };
        let mut cache = Cache::new(&[layer], Arm::Fused).unwrap();
        let seq = cache.add_sequence();
        let rows = vec![0.5; pages * 32 * 64];
        cache.append(0, &[Rows { seq, rows: pages * 32 }], &rows, &rows).unwrap();
        cache.commit(0, &[Rows { seq, rows: pages * 32 }]).unwrap();
        let pages = (0..pages).map(|i| cache.hold_page(seq, i).unwrap()).collect();
        let sequences = (0..3).map(|_| cache.add_sequence()).collect();
        (cache, pages, sequences)
    }

    fn page_of(victim: Option<Victim>) -> Option<PageId> {
        match victim {
            Some(Victim::Page(page)) => Some(page),
            _ => None,
        }
    }

    #[test]
    fn pages_are_found_by_all_tokens_before_them() {
        let (_, pages, _) = cache(4);
        let mut prefixes = Prefixes::default();
        let a = prefixes.keep(&[], &[1, 2], pages[0]);
        let b = prefixes.keep(&[a], &[3, 4], pages[1]);
        let c = prefixes.keep(&[], &[3, 4], pages[2]);
        assert_eq!(prefixes.matching(&[1, 2, 3, 4, 5], 2), [a, b]);
        assert_eq!(prefixes.matching(&[3, 4, 1, 2], 2), [c]);
        assert_eq!(prefixes.matching(&[1, 2, 3], 2), [a], "a page is shared whole or not at all");
        assert_eq!(prefixes.matching(&[1], 2), []);
        assert_eq!(prefixes.pages(&[a, b]), [pages[0], pages[1]]);
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_and_never_what_is_used() {
        let (_, pages, _) = cache(4);
        let mut prefixes = Prefixes::default();
        let a = prefixes.keep(&[], &[1], pages[0]);
        let b = prefixes.keep(&[a], &[2], pages[1]);
        let c = prefixes.keep(&[a], &[3], pages[2]);
        prefixes.take(&[a, b]);
        assert_eq!(page_of(prefixes.victim()), Some(pages[2]), "the others are used");
        assert_eq!(page_of(prefixes.victim()), None);
        assert!(prefixes.has(&[a, b]) && !prefixes.has(&[a, c]));
        prefixes.give_back(&[a, b]);
        assert_eq!(page_of(prefixes.victim()), Some(pages[1]), "parents stay as long as their children");
        assert_eq!(page_of(prefixes.victim()), Some(pages[0]));
        assert_eq!((prefixes.len(), prefixes.matching(&[1, 2], 1)), (0, vec![]));
    }

    #[test]
    fn as_a_last_resort_used_pages_go_and_their_users_may_still_give_them_back() {
        let (_, pages, _) = cache(2);
        let mut prefixes = Prefixes::default();
        let a = prefixes.keep(&[], &[1], pages[0]);
        let b = prefixes.keep(&[a], &[2], pages[1]);
        prefixes.take(&[a, b]);
        assert!(prefixes.victim().is_none());
        assert_eq!(prefixes.last_resort(), Some(pages[1]));
        assert_eq!((prefixes.has(&[a, b]), prefixes.users(a), prefixes.users(b)), (false, 1, 0));
        prefixes.give_back(&[a, b]);
        assert_eq!(page_of(prefixes.victim()), Some(pages[0]));
        assert_eq!(prefixes.last_resort(), None);
    }

    #[test]
    fn sessions_are_kept_whole_and_hold_their_pages() {
        let (_, pages, sequences) = cache(4);
        let mut prefixes = Prefixes::default();
        let a = prefixes.keep(&[], &[1, 2], pages[0]);
        prefixes.keep_session(sequences[0], vec![1, 2, 3], vec![a]);
        prefixes.keep_session(sequences[1], vec![7], vec![]);
        let best = prefixes.sessions_matching(&[1, 2, 9]).max_by_key(|(_, _, n)| *n).map(|(i, _, n)| (i, n));
        assert_eq!(best, Some((0, 2)));
        assert_eq!(prefixes.pages_by_use(false).count(), 1);
        let Some(Victim::Session(first)) = prefixes.victim() else { panic!("the oldest session") };
        assert_eq!((first.id, first.tokens), (sequences[0], vec![1, 2, 3]));
        assert_eq!(page_of(prefixes.victim()), Some(pages[0]), "its page, as old, before the younger session");
        assert!(matches!(prefixes.victim(), Some(Victim::Session(s)) if s.id == sequences[1]));
        assert!(prefixes.victim().is_none());
    }
}
